"""Small records of a store, read with care: one that is damaged is named, never waited for."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

from stages.contract.errors import DamagedRecordError

# Something else is in the file's place: a folder, a loop of links, a file in place of a folder.
# Every other error (permission, input/output, a stale handle) may pass.
_MISPLACED = (errno.ELOOP, errno.ENOTDIR, errno.ENXIO)

MAX_BYTES = 64 << 20
"""Size above which a file is treated as no record; the largest are manifests of many files."""


class MisplacedError(OSError):
    """The path exists but is not a regular file of a record's size."""


def read_record(path: Path) -> bytes:
    """Reads a small file.

    Raises:
        FileNotFoundError: There is none.
        MisplacedError: The path exists but is not a regular file of a record's size.
        OSError: It cannot be read.
    """
    try:
        # A pipe would be waited for until somebody writes into it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        leads_nowhere = error.errno == errno.ENOENT and path.is_symlink()
        if leads_nowhere or error.errno in _MISPLACED:
            raise MisplacedError(error.errno, error.strerror, str(path)) from error
        raise
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise MisplacedError(errno.EINVAL, "Not a regular file", str(path))
    if found.st_size > MAX_BYTES:
        os.close(descriptor)
        raise MisplacedError(errno.EFBIG, f"{found.st_size} bytes are no record", str(path))
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def read_json_record(path: Path, remedy: str) -> dict[str, Any]:
    """Reads a JSON object.

    Args:
        path: The file.
        remedy: What to do where it is damaged.

    Raises:
        FileNotFoundError: There is none.
        DamagedRecordError: It is no JSON object.
    """
    try:
        found = json.loads(read_record(path))
    except MisplacedError as error:
        raise DamagedRecordError(f"{path} is damaged: {error.strerror}", remedy) from error
    except (ValueError, RecursionError) as error:
        # ValueError: no JSON, or no text at all.
        raise DamagedRecordError(f"{path} is damaged: it is not JSON", remedy) from error
    if not isinstance(found, dict):
        raise DamagedRecordError(f"{path} is damaged: it holds no JSON object", remedy)
    return found
