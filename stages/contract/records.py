"""Small records of a store, as JSON; a damaged one is named."""

from pathlib import Path
from typing import Any, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    ValidationError,
    model_serializer,
    model_validator,
)

from stages.contract.digests import sha256_of
from stages.contract.errors import DamagedRecordError

T = TypeVar("T")


class Record(BaseModel):
    """An immutable JSON record that refuses names it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class SealedRecord(Record):
    """A record whose JSON holds a digest of the rest, its ``seal``, so that damage is noticed.

    A damaged digest of a file would otherwise go into the keys of later artifacts.
    """

    @model_serializer(mode="wrap")
    def _with_seal(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        content: dict[str, Any] = serialize(self)
        return {**content, "seal": sha256_of(content)}

    @model_validator(mode="before")
    @classmethod
    def _check_seal(cls, content: Any) -> Any:
        if isinstance(content, dict) and "seal" in content:
            content = dict(content)
            if content.pop("seal") != sha256_of(content):
                raise ValueError("its seal does not fit its content")
        return content


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
