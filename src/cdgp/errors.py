"""Everything this package raises on purpose.

Each message names the file or the option, what is wrong with it, and what to do. Every class
carries the exit code that the command line ends with.

```
CdgpError                     1   the root: catch this to catch all
├── SettingsError             2   an unknown, missing or impossible setting
│   └── NotRunError           2   a method lacks something that the plan must give it
├── DataError                 3   the images, masks or manifest cannot be used
│   ├── ImageError          3   one image or mask that cannot be read as asked
│   └── LeakError             3   the same image on both sides of a split
├── WeightsError              1   backbone weights that cannot be had
├── ModelFileError            1   a model file that is damaged, foreign or from another version
├── OutputError               1   a place that cannot be written, or that holds something already
├── LatencyError              1   a measuring process that ended early
└── TrainingError             1   training went wrong
    └── NoSeparationError     1   good and defective images do not separate: no usable model
```
"""


class CdgpError(Exception):
    """Root of every error raised on purpose."""

    exit_code = 1


class SettingsError(CdgpError):
    """An unknown, missing or impossible setting or option."""

    exit_code = 2


class NotRunError(SettingsError):
    """A method lacks something that the plan must give; in a benchmark its row says 'not run'."""


class DataError(CdgpError):
    """Images, masks or a manifest that cannot be used."""

    exit_code = 3


class ImageError(DataError):
    """One image or mask that cannot be read as asked; the message begins with its path."""


class LeakError(DataError):
    """The same image stands on both sides of a split."""


class WeightsError(CdgpError):
    """Backbone weights that cannot be had; the message names the other ways to get them."""


class ModelFileError(CdgpError):
    """A model file that is damaged, not ours, or written by another version."""


class OutputError(CdgpError):
    """A place that cannot be written, or that already holds something."""


class LatencyError(CdgpError):
    """A measuring process that ended early."""


class TrainingError(CdgpError):
    """Training could not go on."""


class NoSeparationError(TrainingError):
    """Good and defective training images do not separate, so there is no usable model."""
