"""Files that a benchmark makes, as inputs of stages."""

from __future__ import annotations

import functools
from pathlib import Path

from stages.contract.digests import digest_of, state_of
from stages.contract.request import FileInput


def file_input(path: Path) -> FileInput:
    """A file or folder as an input: stages refuse one whose content is not the digest's.

    Raises:
        UserError: See :func:`stages.contract.digests.digest_of`.
    """
    state = state_of(path)
    return FileInput(location=str(path), digest=_digest(path, state), state=state)


@functools.cache
def _digest(path: Path, state: str) -> str:
    """The digest of a file in one state: a large model is hashed once for all measurements."""
    return digest_of(path)
