"""Base of every stage's parameters."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

_MARK = "affects_result"


def speed_only(default: Any, **options: Any) -> Any:
    """A field that changes speed or place, never the result: it stays out of the key.

    >>> class Example(StageParams):
    ...     batch_size: int = speed_only(8, description="Rows per forward pass.")
    """
    return Field(default, json_schema_extra={_MARK: False}, **options)


class Settings(BaseModel):
    """An immutable group of settings that refuses names it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    def unused_fields(self) -> frozenset[str]:
        """Names of fields that nothing reads under the values of the others; not in the key."""
        return frozenset()

    def result_fields(self) -> dict[str, Any]:
        """The settings that can change the result, as JSON values."""
        kept: dict[str, Any] = {}
        dumped = self.model_dump(mode="json")
        unused = self.unused_fields()
        for name, field in type(self).model_fields.items():
            extra = field.json_schema_extra
            if name in unused or (isinstance(extra, dict) and extra.get(_MARK) is False):
                continue
            value = getattr(self, name)
            kept[name] = value.result_fields() if isinstance(value, Settings) else dumped[name]
        return kept


class StageParams(Settings):
    """Parameters of one stage.

    A subclass names its stage and the version of its behaviour; raising the version makes every
    artifact of the stage stale.
    """

    stage: ClassVar[str]
    version: ClassVar[str]
