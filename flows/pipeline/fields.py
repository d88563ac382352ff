"""The fields of the configuration as a table: names, defaults, kinds and meanings."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from flows.pipeline.config import SET_BY_THE_RUN, RunConfig, StageResources
from stages.contract.params import SPEED_ONLY
from stages.contract.request import Resources

_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
_KINDS = {
    str: "text",
    int: "integer",
    float: "number",
    bool: "true, false",
    type(None): "null",
}


@dataclass(frozen=True)
class FieldRow:
    """One field of a configuration.

    Attributes:
        name: Its name with the sections before it; `NAME` is a name that the user chooses.
        default: The default as JSON; None if a value is required.
        speed_only: Whether it changes speed or place alone, so that no artifact's key holds it.
    """

    name: str
    default: str | None
    kind: str
    meaning: str
    speed_only: bool


def run_rows(prefix: str = "") -> list[FieldRow]:
    """The settings of a run whose names begin with ``prefix``, each once.

    Resources, alike for all stages, stand under `STAGE`; what the run sets itself is left out.
    """
    rows = []
    for row in field_rows(RunConfig):
        section, _, name = row.name.partition(".")
        if section != "resources" and name not in SET_BY_THE_RUN.get(section, ()):
            rows.append(row)
    rows += field_rows(Resources, "resources.STAGE.")
    stages = "|".join(StageResources.model_fields)
    prefix = re.sub(rf"^resources\.({stages})\b", "resources.STAGE", prefix)
    return [row for row in rows if row.name.startswith(prefix)]


def field_rows(model: type[BaseModel], prefix: str = "") -> Iterator[FieldRow]:
    """Yields every field of a configuration, sections opened, in the order of its declaration."""
    for name, field in model.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            yield from field_rows(section, f"{prefix}{name}.")
            continue
        yield _row(f"{prefix}{name}", field)
        # Sections under names that the user chooses, such as `suites`.
        inner = get_args(section)[-1] if get_origin(section) is dict else None
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from field_rows(inner, f"{prefix}{name}.NAME.")


def _row(name: str, field: FieldInfo) -> FieldRow:
    default = json.dumps(
        field.get_default(call_default_factory=True), default=str, ensure_ascii=False
    )
    return FieldRow(
        name=name,
        default=None if field.is_required() else default,
        kind=_kind(field),
        meaning=" ".join((field.description or "").split()),
        speed_only=field.json_schema_extra == SPEED_ONLY,
    )


def _kind(field: FieldInfo) -> str:
    kind = " or ".join(dict.fromkeys(_kinds(field.annotation)))
    bounds = [
        f"{sign} {getattr(item, name):g}"
        for item in field.metadata
        for name, sign in _BOUNDS.items()
        if hasattr(item, name)
    ]
    return ", ".join([kind, *bounds])


def _kinds(annotation: Any) -> list[str]:
    if annotation in _KINDS:
        return [_KINDS[annotation]]
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    if origin is Literal:
        return [str(argument) for argument in arguments]
    if origin in (tuple, list):
        return [f"list of {' or '.join(_kinds(arguments[0]))}"]
    if origin is dict:
        return ["names and values"]
    if hasattr(annotation, "__metadata__"):
        return _kinds(arguments[0])
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return ["section"]
    return [kind for argument in arguments for kind in _kinds(argument)] or ["text"]
