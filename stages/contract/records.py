"""Small records of a store, read with care: one that is damaged is named, never waited for."""

import errno
import os
import stat
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from stages.contract.errors import DamagedRecordError

# Something else is in the file's place: a folder, a loop of links, a file in place of a folder.
# Every other error (permission, input/output, a stale handle) may pass.
_MISPLACED = (errno.ELOOP, errno.ENOTDIR, errno.ENXIO)
# A file above this size is no record; the largest are manifests of many files.
_MAX_BYTES = 64 << 20

T = TypeVar("T")


def read_content(path: Path, remedy: str = "") -> bytes:
    """Reads a small file.

    Raises:
        FileNotFoundError: There is none.
        DamagedRecordError: The path exists but is not a regular file of a record's size.
        OSError: It cannot be read.
    """
    try:
        # A pipe would be waited for until somebody writes into it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        leads_nowhere = error.errno == errno.ENOENT and path.is_symlink()
        if leads_nowhere or error.errno in _MISPLACED:
            raise DamagedRecordError(f"{path} is damaged: {error.strerror}", remedy) from error
        raise
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_size > _MAX_BYTES:
        os.close(descriptor)
        raise DamagedRecordError(f"{path} is damaged: it is not a small file", remedy)
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def read_record(path: Path, kind: type[T], remedy: str = "") -> T:
    """Reads a JSON record as :func:`read_content`; DamagedRecordError if it is of another kind."""
    content = read_content(path, remedy)
    try:
        return TypeAdapter(kind).validate_json(content)
    except ValidationError as error:
        said = error.errors(include_url=False, include_input=False)[0]["msg"]
        raise DamagedRecordError(f"{path} is damaged: {said}", remedy) from error
