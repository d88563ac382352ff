"""Small records of a store, as JSON; a damaged one is named."""

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from stages.contract.errors import DamagedRecordError

T = TypeVar("T")


class Record(BaseModel):
    """An immutable JSON record that refuses names it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def read_record(path: Path, kind: type[T], remedy: str = "") -> T:
    """Reads a JSON record.

    Raises:
        FileNotFoundError: There is none.
        DamagedRecordError: It is of another kind.
    """
    try:
        return TypeAdapter(kind).validate_json(path.read_bytes())
    except (ValidationError, IsADirectoryError) as error:
        raise DamagedRecordError(f"{path} is damaged: {_reason(error)}", remedy) from error


def _reason(error: ValidationError | IsADirectoryError) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        return ": ".join([*map(str, first["loc"]), first["msg"]])
    return "it is a folder"
