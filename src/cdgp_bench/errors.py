"""Errors that only the benchmark raises; the others are in ``cdgp.errors``."""

from cdgp.errors import CdgpError, SettingsError


class NotRunError(SettingsError):
    """A method lacks an input that the plan must give; its row says 'not run'."""


class LatencyError(CdgpError):
    """A measuring process ended early."""
