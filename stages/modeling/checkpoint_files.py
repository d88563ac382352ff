"""Weights of a local checkpoint, checked before a library uses them; faults by the file's name."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from stages.contract.errors import UserError
from stages.harness.context import ModelSource
from stages.modeling.engine_errors import is_out_of_memory

# Characters of a library's message that are shown.
_SHOWN_CHARACTERS = 300


def checkpoint_folder(source: ModelSource) -> Path | None:
    """The folder that ``source`` names, or None for a hub id."""
    return Path(source.name_or_path) if source.revision is None else None


def is_finite(weight: torch.Tensor) -> bool:
    """True if all numbers of a weight are finite; no copy of it is made."""
    # NaN is both least and greatest.
    return not weight.numel() or bool(torch.stack(weight.aminmax()).isfinite().all())


@contextmanager
def explained(what: str, source: ModelSource) -> Iterator[None]:
    """Turns a library's errors about a checkpoint that it cannot load into one message.

    Raises:
        UserError: It cannot: the same files would not be loaded by a retry either.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        is_usual = isinstance(error, OSError | ValueError | ImportError)
        # A hub may answer the next time.
        if is_out_of_memory(error) or not (is_usual or checkpoint_folder(source)):
            raise
        message = " ".join(str(error).split())[:_SHOWN_CHARACTERS]
        # A library's own code raised it: `'zelu'` alone says little.
        message = message if is_usual and message else f"{type(error).__name__}: {message}"
        raise UserError(
            f"{what} of {source.name_or_path} cannot be loaded: {message}",
            "pass a folder or hub id that transformers can load without remote code",
        ) from error


def some_of(names: Iterable[str]) -> str:
    """The first few names in their order, for a message."""
    listed = sorted(names)
    return ", ".join(listed[:5]) + (", …" if len(listed) > 5 else "")
