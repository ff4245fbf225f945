"""Every error that this package raises on purpose.

Each message says which file or option is wrong, what is wrong with it, and what to do. Each class
has the exit code of the command line.

```
CdgpError                     1   the root: catch this to catch all
├── SettingsError             2   an unknown, missing or impossible setting or option
├── DataError                 3   images, masks or a manifest that cannot be used
│   ├── ImageError            3   one image or mask that cannot be read
│   └── LeakError             3   the same image on both sides of a split
├── WeightsError              1   backbone weights that cannot be loaded
├── ModelFileError            1   a model file that is damaged, foreign or of another version
├── OutputError               1   a place that cannot be written, or that already holds something
├── StationError              1   a station that cannot start, or cannot do what it is asked for
└── TrainingError             1   training failed
    └── NoSeparationError     1   good and defective images are not separable: no usable model

KeyboardInterrupt
└── Interrupted             130   stopped by the user; what is finished can be resumed
```
"""


class CdgpError(Exception):
    """Root of every error raised on purpose."""

    exit_code = 1


class SettingsError(CdgpError):
    """An unknown, missing or impossible setting or option."""

    exit_code = 2


class DataError(CdgpError):
    """Images, masks or a manifest that cannot be used."""

    exit_code = 3


class ImageError(DataError):
    """One image or mask that cannot be read; the message begins with its path."""


class LeakError(DataError):
    """The same image is on both sides of a split."""


class WeightsError(CdgpError):
    """Backbone weights that cannot be loaded; the message names other ways to get them."""


class ModelFileError(CdgpError):
    """A model file that is damaged, not ours, or written by another version."""


class OutputError(CdgpError):
    """A place that cannot be written, or that already holds something."""


class StationError(CdgpError):
    """An inspection station that cannot start, or that cannot do what it was asked for."""


class TrainingError(CdgpError):
    """Training failed."""


class NoSeparationError(TrainingError):
    """Good and defective training images are not separable, so there is no usable model."""


class Interrupted(KeyboardInterrupt):
    """Stopped by the user; the message says how much is finished and how to go on."""
