"""Base of every stage's parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from stages.contract.signature import ImageName, InputSpec, OutputSpec

_MARK = "affects_result"
_LATER = "added_later"


def speed_only(default: Any, **options: Any) -> Any:
    """A field that changes speed or place, never the result: it stays out of the key.

    >>> class Example(StageParams):
    ...     batch_size: int = speed_only(8, description="Rows per forward pass.")
    """
    return Field(default, json_schema_extra={_MARK: False}, **options)


def added_later(default: Any, **options: Any) -> Any:
    """A field of a later version: not in the key at its default, so that older artifacts stay good.

    >>> class Example(StageParams):
    ...     pairs_per_prompt: int = added_later(1, ge=1)
    """
    return Field(default, json_schema_extra={_LATER: True}, **options)


class Settings(BaseModel):
    """An immutable group of settings that refuses names it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _number_is_no_truth_value(cls, value: Any, info: ValidationInfo) -> Any:
        # To pydantic `true` is the number 1.
        if not isinstance(value, bool):
            return value
        annotation = cls.model_fields[str(info.field_name)].annotation
        kinds = get_args(annotation) or (annotation,)
        if bool not in kinds and (int in kinds or float in kinds):
            raise ValueError("a number is wanted")
        return value

    def unused_fields(self) -> frozenset[str]:
        """Names of fields that the others make irrelevant to the result; not in the key."""
        return frozenset()

    def result_fields(self) -> dict[str, Any]:
        """The settings that can change the result, as JSON values."""
        kept: dict[str, Any] = {}
        dumped = self.model_dump(mode="json")
        unused = self.unused_fields()
        for name, field in type(self).model_fields.items():
            extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
            value = getattr(self, name)
            at_default = value == field.get_default(call_default_factory=True)
            if name in unused or extra.get(_MARK) is False or (extra.get(_LATER) and at_default):
                continue
            kept[name] = value.result_fields() if isinstance(value, Settings) else dumped[name]
        return kept


class StageParams(Settings):
    """Parameters of one stage, and what the rest of the project needs to know of it.

    Of the class variables only ``stage`` and ``version`` enter the key.
    """

    stage: ClassVar[str]
    """Name of the stage and of its folder."""
    version: ClassVar[str]
    """Version of its behaviour; raising it makes every artifact of the stage stale."""
    inputs: ClassVar[Mapping[str, InputSpec]] = {}
    """Inputs by name."""
    outputs: ClassVar[Mapping[str, OutputSpec]] = {}
    """Files and folders of the artifact by path; ``*`` in a path stands for any text."""
    image: ClassVar[ImageName] = "core"
    """Container image that the stage needs; see :meth:`image_for`."""
    late_modules: ClassVar[tuple[str, ...]] = ()
    """Modules that the stage imports while it runs; :mod:`stages.contract.fork_server` loads them
    beforehand."""
    engine_inputs: ClassVar[tuple[str, ...]] = ()
    """Names of the inputs that the engine of :meth:`engine` has loaded."""
    writes_registry: ClassVar[bool] = False
    """True for a stage that writes into the model registry of its store."""

    def engine(self) -> Any:
        """Settings of the engine that the stage loads, for a stage that can keep it; else None.

        Calls of the stage with equal ones, and with equal inputs :attr:`engine_inputs`, can be
        computed by one program that loads the engine once.
        """
        return None

    def image_for(self, *, from_hub: bool) -> ImageName:
        """Container image for these parameters; to be overridden where they decide.

        Args:
            from_hub: Whether an input comes from the Hugging Face hub.
        """
        return self.image
