"""Everything that pbnn raises or warns on purpose.

Each message is one sentence that names the thing, says what was expected and what came, and shows
the repair. The command line prints it on stderr and exits with status 2.
"""

__all__ = [
    "ConvergenceWarning",
    "DataError",
    "FileError",
    "FitError",
    "ModelError",
    "PbnnError",
    "PbnnWarning",
]


class PbnnError(Exception):
    """Base of all errors that pbnn raises on purpose."""


class DataError(PbnnError, ValueError):
    """The data or the options that describe them cannot be used as they are."""


class ModelError(PbnnError, ValueError):
    """The model, or its fit to the data's shapes and types, is at fault."""


class FitError(PbnnError, RuntimeError):
    """A fit could not start, or had to stop."""


class FileError(PbnnError, ValueError):
    """A file is not what its name or format promises."""


class PbnnWarning(UserWarning):
    """Base of all warnings that pbnn gives."""


class ConvergenceWarning(PbnnWarning):
    """A fit ended, but its draws should not be trusted yet."""
