"""Messages for a full or read-only disk."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stages.contract.errors import GebError, UserError

# A device with less room than this is full: no stage's output fits.
_FULL_BYTES = 1 << 20


@contextmanager
def explain_disk_errors(place: Path) -> Iterator[None]:
    """Turns "no space left" and "read-only" into one clear message about the store."""
    try:
        yield
    except GebError:
        # Says itself what is wrong; a full disk would be a guess.
        raise
    except Exception as error:
        number = _error_number(error)
        remedy = "free some space (`geb gc` lists what can go) or put the store elsewhere"
        if number in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"no space left on the device that holds {place}", remedy) from error
        if number in (errno.EROFS, errno.EACCES):
            raise UserError(
                f"{place} cannot be written: {os.strerror(number)}",
                "check the permissions of the store, or set `store` to a folder of yours",
            ) from error
        if _is_full(place):
            raise UserError(
                f"{type(error).__name__}: {error}; the likely cause: no space left on the device "
                f"that holds {place}",
                remedy,
            ) from error
        raise


def _is_full(place: Path) -> bool:
    """True where the device is all but full: some libraries (torch) hide what a write met."""
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free < _FULL_BYTES


def _error_number(error: Exception) -> int:
    """The errno behind an error, 0 for none; libraries in Rust (safetensors) put it in the text."""
    if isinstance(error, OSError):
        return error.errno or 0
    named = re.search(r"\(os error (\d+)\)", str(error))
    return int(named[1]) if named else 0
