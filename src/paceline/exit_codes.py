"""How a program of ours ends: the same for the command line and for the services."""

from __future__ import annotations

from paceline.errors import (
    ConfigurationError,
    InvalidArgument,
    ModelError,
    NotFound,
    PacelineError,
    Unauthenticated,
    Unavailable,
)

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNAVAILABLE = 3
EXIT_INTERRUPTED = 130


def exit_code(error: PacelineError) -> int:
    """2 for what the user can correct on the command line, 3 for what cannot be reached, 1 for all else."""
    if isinstance(error, (InvalidArgument, ConfigurationError, NotFound, Unauthenticated)):
        return EXIT_USAGE
    if isinstance(error, ModelError) and error.field:
        return EXIT_USAGE  # the model that an option names is none
    return EXIT_UNAVAILABLE if isinstance(error, Unavailable) else EXIT_FAILED
