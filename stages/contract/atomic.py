"""Atomic writes: a file appears whole or not at all, and a disk that takes nothing is named."""

import errno
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stages.contract.errors import GebError, UserError

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def atomic_path(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yields a temporary name next to ``path``, which is renamed to it when the block ends well.

    A reader sees the file before or the file after. On an error the temporary file is removed.
    A ``durable`` file outlives a loss of power: content and name are synced to disk.

    Raises:
        UserError: The disk is full, or the folder cannot be written.
    """
    suffix = uuid.uuid4().hex[:8]
    scratch = path.with_name(f".{path.name}.{suffix}")
    with explain_disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield scratch
            if durable:
                fsync(scratch)
            scratch.replace(path)
        finally:
            scratch.unlink(missing_ok=True)
        if durable:
            fsync(path.parent)


def write_atomically(path: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Writes a small file; see :func:`atomic_path`."""
    data = content.encode() if isinstance(content, str) else content
    with atomic_path(path, durable=durable) as scratch:
        scratch.write_bytes(data)


def fsync(path: Path) -> None:
    """Brings a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def explain_disk_errors(folder: Path) -> Iterator[None]:
    """Turns "no space left", "read-only" and "denied" into one clear message.

    A file that is denied or full outside of the store is named itself.
    """
    try:
        yield
    except GebError:
        # Says itself what is wrong; a full disk would be a guess.
        raise
    except Exception as error:
        number = _error_number(error)
        if number not in (*_FULL, errno.EROFS, errno.EACCES, errno.EPERM):
            raise
        named = getattr(error, "filename", None)
        # A folder that is still to be made is denied by one above it.
        is_outside = named and folder.exists() and not Path(named).is_relative_to(folder)
        if number in _FULL:
            place = named if is_outside else folder
            others = "" if named else ", or a cache or temporary folder (HF_HOME, TMPDIR)"
            raise UserError(
                f"no space left on the device that holds {place}{others}",
                "free some space (`geb gc` lists what can go of a store) or name another place",
            ) from error
        if is_outside:
            raise UserError(
                f"{named} cannot be opened: {os.strerror(number)}",
                "let the user that the stage runs as open it",
            ) from error
        raise UserError(
            f"{folder} cannot be written: {os.strerror(number)}",
            "change its permissions, or name another folder (`store`, if it is of the store)",
        ) from error


def _error_number(error: Exception) -> int | None:
    """The errno behind an error."""
    if isinstance(error, OSError):
        return error.errno
    # torch.save says no more than that its stream took fewer bytes than it gave.
    if "unexpected pos" in str(error):
        return errno.ENOSPC
    # safetensors, which is in Rust, puts it in the text.
    named = re.search(r"\(os error (\d+)\)", str(error))
    return int(named[1]) if named else None
