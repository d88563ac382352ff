"""The schema of the form that the Prefect UI shows for a configuration.

Every field of the form starts empty, and an empty field is not sent: what the person fills in is
laid over the preset, and nothing else. So the schema is the configuration's own without its
defaults, which move into the help texts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, GetJsonSchemaHandler
from pydantic_core import CoreSchema

Schema = dict[str, Any]

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

    Attributes:
        model: The configuration.
        hidden: Fields left out, by section; those of no section are under the empty name.
    """

    model: type[BaseModel]
    hidden: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash(self.model)

    def __get_pydantic_json_schema__(
        self, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> Schema:
        """Replaces the schema of a plain ``dict``."""
        whole = self.model.model_json_schema()
        section = _section(whole, whole.get("$defs", {}))
        for name, fields in self.hidden.items():
            place = section["properties"][name] if name else section
            for each in fields:
                del place["properties"][each]
        return section


def _section(schema: Schema, definitions: Mapping[str, Schema]) -> Schema:
    properties = {
        name: _field(name, each, definitions) | {"position": position}
        for position, (name, each) in enumerate(schema["properties"].items())
    }
    return {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "description": _one_line(schema.get("description", "")),
    }


def _field(name: str, schema: Schema, definitions: Mapping[str, Schema]) -> Schema:
    if "$ref" in schema:
        target = definitions[schema["$ref"].rpartition("/")[2]]
        own = {key: value for key, value in schema.items() if key not in ("$ref", "default")}
        if "properties" in target:
            return _section(target, definitions) | own | {"title": name}
        return _field(name, target | own, definitions)
    shown = {
        key: _inlined(value, definitions)
        for key, value in schema.items()
        if key not in ("default", "affects_result")
    }
    # The UI's switch has no empty position.
    if shown.get("type") == "boolean":
        shown = {key: value for key, value in shown.items() if key != "type"}
        shown["enum"] = [True, False]
    if "anyOf" in shown:
        shown["anyOf"] = [
            {"title": _TAB_NAMES.get(each.get("type", ""), "JSON"), **each}
            for each in shown["anyOf"]
        ]
    help_text = _one_line(schema.get("description", ""))
    if "default" in schema:
        default = schema["default"]
        said = "unset" if default is None else f"`{json.dumps(default, ensure_ascii=False)}`"
        help_text = f"{help_text} Default: {said}."
    return shown | {"title": name, "description": help_text}


def _inlined(value: Any, definitions: Mapping[str, Schema]) -> Any:
    """A part of a schema with definitions in place of references: the form has none of its own."""
    if isinstance(value, list):
        return [_inlined(each, definitions) for each in value]
    if not isinstance(value, dict):
        return value
    if "$ref" in value:
        return _inlined(definitions[value["$ref"].rpartition("/")[2]], definitions)
    return {key: _inlined(each, definitions) for key, each in value.items()}


def _one_line(text: str) -> str:
    return " ".join(text.split())
