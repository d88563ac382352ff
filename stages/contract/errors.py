"""One tree of errors for stages and orchestrator.

To add one: subclass the nearest entry below and say in its docstring who is at fault and whether a
retry can help; ``stages.harness.program`` turns the class into an exit code.
"""

from collections.abc import Iterator
from contextlib import contextmanager

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USER = 64
EXIT_OVERDUE = 124
EXIT_STOPPED = 143
# Longest message: it may quote a file, and a run shows it up to three times.
_MAX_CHARACTERS = 1000


class GebError(Exception):
    """Base of every error that this project raises on purpose."""

    def __init__(self, message: str = "") -> None:
        if len(message) > _MAX_CHARACTERS:
            half = _MAX_CHARACTERS // 2
            message = f"{message[:half]} … {message[-half:]}"
        super().__init__(message)


class UserError(GebError, ValueError):
    """A request, a configuration or its data is wrong: exit code 64, never retried.

    Args:
        message: The mistake, with its value and its place.
        remedy: What the person can do about it.
    """

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.message: str = self.args[0]
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}\n  remedy: {self.remedy}" if self.remedy else self.message


@contextmanager
def located(position: str) -> Iterator[None]:
    """Puts a position before the message of a mistake that is found within the block."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{position}: {error.message}", error.remedy) from error


class RefusedError(UserError):
    """The place of the stages refuses one, as the run is configured: the run ends at once."""


class StoreError(GebError):
    """The store cannot be reached or written: a failure, never a reason to compute again."""


class NoStoreError(StoreError):
    """The place holds no store: it is wrong, or its file system is not mounted (yet)."""


class ConflictError(StoreError):
    """Another host changed a record of a bucket meanwhile; the change can be made again."""


class DamagedRecordError(UserError, StoreError):
    """A record of the store cannot be understood; a person has to mend it, no retry helps."""


class DamagedArtifactError(GebError):
    """An artifact's files differ from its manifest."""


class LeaseLostError(GebError):
    """Another process took over the key that this one was computing."""


class StoppedError(BaseException):
    """The stage was asked to stop (SIGTERM): exit code 143, may be retried.

    Not an ``Exception``: a library's ``except Exception`` must not swallow the wish to stop.
    """


class RunCancelledError(GebError):
    """A person cancelled the run; it can be resumed."""


class RunInterruptedError(RunCancelledError):
    """Ctrl-C or SIGTERM stopped the run, which another thread than the interrupted one drives."""


class StageFailedError(GebError):
    """A stage ended with an exit code that a retry may cure.

    ``last_lines`` are the end of its log, oldest first.
    """

    def __init__(self, message: str, last_lines: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.last_lines = last_lines


class PreemptedError(StageFailedError):
    """A stage's machine was taken from it: preemption, drain, spot notice, time limit, node lost.

    Nobody's fault: it starts again, and uses up no retry. The executor limits how often
    that may happen without a new checkpoint.
    """
