"""The schema of the form that the Prefect UI shows for a configuration: the fields in common use.

Every field of the form starts empty, and an empty field is not sent: what the person fills in is
laid over the preset, and nothing else. So the schema is the configuration's own without its
defaults, which move into the help texts. All other fields of the configuration are set by lines
like those that ``--set`` takes, or by parameters given as JSON.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, GetJsonSchemaHandler
from pydantic_core import CoreSchema

Schema = dict[str, Any]

RUN_FIELDS = ("name", "seed")
"""Fields that tell runs of one configuration apart."""
COMMON_FIELDS = (
    "iterations",
    "train.kappa",
    "train.design",
    "train.divergence",
    "train.learning_rate",
    "generate.num_samples",
    "inputs.prompts",
    "inputs.policy",
    "inputs.oracle_code",
    "score.oracle",
    "execution.runner",
    "execution.parallel",
    "store",
)
"""In the order of the form: what differs between runs of one task stands first."""
SETTINGS = "settings"
"""Entry beside the configuration's own sections, with fields that the form does not show."""
_SETTINGS_SCHEMA = {
    "type": "array",
    "items": {"type": "string"},
    "title": SETTINGS,
    "description": "Any other fields, a line each: `train.beta=0.05`, `resources.train.gpus=1`. "
    "`geb fields` and the documentation list them.",
}

# Titles of the tabs of a field that takes several kinds of values.
_TAB_NAMES = {"string": "text", "integer": "number", "number": "number", "null": "unset"}


@dataclass(frozen=True)
class OneOf:
    """Annotates a ``str`` with the values that the form offers, looked up when it is made."""

    values: Callable[[], Sequence[str]]

    def __get_pydantic_json_schema__(
        self, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> Schema:
        """Adds the values to the schema of a plain ``str``."""
        return {"type": "string", "enum": list(self.values())}


@dataclass(frozen=True)
class FormOf:
    """Annotates a ``dict`` of overrides with the form of the configuration that they belong to.

    The form shows the fields of these full names, in this order.
    """

    model: type[BaseModel]
    shown: tuple[str, ...]

    def __get_pydantic_json_schema__(
        self, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> Schema:
        """Replaces the schema of a plain ``dict``."""
        whole = self.model.model_json_schema()
        section = _section(whole, whole.get("$defs", {}), self.shown)
        section["properties"][SETTINGS] = _SETTINGS_SCHEMA | {"position": len(self.shown)}
        return section


def _section(
    schema: Schema, definitions: Mapping[str, Schema], shown: Sequence[str], place: str = ""
) -> Schema:
    properties: dict[str, Schema] = {}
    for name, each in schema["properties"].items():
        inside = f"{place}{name}."
        at = [at for at, other in enumerate(shown) if f"{other}.".startswith(inside)]
        if not at:
            continue
        whole = {**_target(each, definitions), **each}
        is_field = place + name in shown
        properties[name] = (
            _field(whole, definitions) if is_field else _section(whole, definitions, shown, inside)
        )
        properties[name] |= {"title": name, "position": at[0]}
    description = " ".join(schema.get("description", "").split())
    return {"type": "object", "properties": properties, "description": description}


def _target(schema: Schema, definitions: Mapping[str, Schema]) -> Schema:
    """The definition that a schema refers to; nothing if it refers to none."""
    return definitions[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else {}


def _field(schema: Schema, definitions: Mapping[str, Schema]) -> Schema:
    left_out = ("$ref", "default", "affects_result")
    shown = {
        key: _inlined(value, definitions) for key, value in schema.items() if key not in left_out
    }
    if "anyOf" in shown:
        shown["anyOf"] = [
            {"title": _TAB_NAMES.get(each.get("type", ""), "JSON"), **each}
            for each in shown["anyOf"]
        ]
    help_text = " ".join(schema.get("description", "").split())
    if "default" in schema:
        default = schema["default"]
        said = "unset" if default is None else f"`{json.dumps(default, ensure_ascii=False)}`"
        help_text = f"{help_text} Default: {said}."
    return shown | {"description": help_text}


def _inlined(value: Any, definitions: Mapping[str, Schema]) -> Any:
    """A part of a schema with definitions in place of references: the form has none of its own."""
    if isinstance(value, list):
        return [_inlined(each, definitions) for each in value]
    if not isinstance(value, dict):
        return value
    if "$ref" in value:
        return _inlined(_target(value, definitions), definitions)
    return {key: _inlined(each, definitions) for key, each in value.items()}
