"""Records of the model registry: versions of a model, and aliases with their history."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from stages.contract.atomic import write_atomically
from stages.contract.errors import DamagedRecordError
from stages.contract.records import MisplacedError, read_record
from stages.contract.request import ArtifactInput


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


R = TypeVar("R", bound=_Record)


class ModelVersion(_Record):
    """One registered checkpoint."""

    format: Literal[1] = 1
    name: str
    version: int
    """1, 2, 3, … within the name."""
    checkpoint: ArtifactInput
    """The checkpoint's place in the store, with its digest."""
    metrics: dict[str, Any]
    """The evaluation at the time it was registered."""
    run: str
    step: str
    created: str
    """UTC, ISO 8601."""


class AliasMove(_Record):
    """One entry of an alias's history."""

    version: int
    action: Literal["set", "rollback"]
    reason: str
    time: str
    """UTC, ISO 8601."""


class Alias(_Record):
    """Version that an alias names, and the history of its changes."""

    format: Literal[1] = 1
    alias: str
    version: int
    previous: tuple[int, ...] = ()
    """Versions that a rollback returns to, the next one last."""
    history: tuple[AliasMove, ...] = ()
    """Every move, oldest first."""


def read(path: Path, kind: type[R]) -> R | None:
    """Reads a record; None where there is none.

    Raises:
        DamagedRecordError: It is not a record of that kind.
    """
    try:
        return kind.model_validate_json(read_record(path))
    except FileNotFoundError:
        return None
    except (MisplacedError, ValidationError) as error:
        raise DamagedRecordError(
            f"{path} is damaged: it is not a {kind.__name__} record",
            "restore it from a backup, or remove it and register (`geb resume RUN`) or set "
            "(`geb promote MODEL:VERSION`) it again",
        ) from error


def write(path: Path, record: _Record) -> None:
    """Writes a record, which appears whole."""
    write_atomically(path, record.model_dump_json(indent=2), durable=True)
