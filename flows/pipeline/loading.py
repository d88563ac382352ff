"""Configuration files: sparse YAML in, a checked RunConfig out, errors that help."""

import copy
import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from flows.pipeline.checks import check
from flows.pipeline.config import RunConfig
from flows.pipeline.paths import anchor_paths
from flows.pipeline.strict_yaml import parse_yaml, read_yaml, unusable
from stages.contract.errors import UserError
from stages.store.opening import location_of

# Most of a value, and most problems, in a message.
_SHOWN_CHARACTERS = 200
_SHOWN_PROBLEMS = 20
_SUFFIXES = (".yaml", ".yml", ".json")
OUR_NAMES = {
    "dataset_name": "inputs.prompts",
    "lora_alpha": "train.lora.alpha",
    "loss_type": "train.loss",
    "lr_scheduler_type": "train.lr_schedule",
    "max_completion_length": "generate.max_new_tokens",
    "max_length": "train.max_length_tokens",
    "max_prompt_length": "train.max_prompt_tokens",
    "model_name_or_path": "inputs.policy",
    "num_generations": "generate.num_samples",
    "num_train_epochs": "train.epochs",
    "output_dir": "store",
    "per_device_train_batch_size": "train.global_batch_pairs",
    "r": "train.lora.rank",
}
"""Settings by the names that TRL, PEFT and transformers give them."""
S = TypeVar("S", bound=BaseModel)


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads the configuration of a run; see :func:`load_settings`."""
    return load_settings(path, overrides, RunConfig)


def load_settings(path: Path | None, overrides: Sequence[str], schema: type[S]) -> S:
    """Reads a configuration file and applies ``section.field=value`` overrides.

    ``extends`` names one or several files, relative to this one, that are read first. Paths are
    relative to the file that names them; paths in overrides, and the default store, to
    the present folder. Without a file, settings have their defaults.

    Raises:
        UserError: The file cannot be read or a value is wrong; the message names all of them.
    """
    values = {} if path is None else read_sections(path)
    for override in overrides:
        _apply(values, override, schema)
    origin = "the command line" if path is None else str(path.absolute())
    origin += " with --set" if overrides and path else ""
    return _with_absolute_store(_check(values, origin, schema))


def overrides_of(said: Sequence[str]) -> dict[str, Any]:
    """Values of ``--set NAME=VALUE`` as nested sections; paths start in the present folder."""
    values: dict[str, Any] = {}
    for override in said:
        _apply(values, override, RunConfig)
    return values


def load_overridden(path: Path, overrides: Mapping[str, Any], origin: str) -> RunConfig:
    """Reads the configuration of a run and lays nested ``overrides`` over it.

    Errors are as in :func:`load_settings`, and name the overrides' ``origin``.
    """
    current = copy.deepcopy(dict(overrides))
    anchor_paths(current, Path.cwd())
    return _with_absolute_store(check_config(merged(read_sections(path), current), origin))


def merged(values: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Nested sections with others laid over them, as a copy."""
    result = copy.deepcopy(dict(values))
    _merge(result, others)
    return result


def with_fields(config: RunConfig, fields: Mapping[str, Any], origin: str) -> RunConfig:
    """A configuration with some fields changed.

    Fields have their full names, ``train.kappa``; messages say by ``origin`` where they come from.

    Raises:
        UserError: A field is unknown, or a value is wrong; the message names all of them.
    """
    values = config.to_values()
    for name, value in fields.items():
        _set(values, name.split("."), value)
    anchor_paths(values, Path.cwd())
    return check_config(values, origin)


def check_config(values: dict[str, Any], origin: str) -> RunConfig:
    """Validates a run's configuration; ``origin`` says in messages where the values come from."""
    return _check(values, origin, RunConfig)


def _check(values: dict[str, Any], origin: str, schema: type[S]) -> S:
    """Validates settings."""
    listed = "; `geb fields` lists all of them with their meaning" if schema is RunConfig else ""
    remedy = f"correct these settings{listed}"
    try:
        checked = schema.model_validate(values)
    except ValidationError as error:
        problems = [_explain(dict(problem), schema) for problem in error.errors()]
        raise _invalid(origin, problems, remedy) from error
    # Here, since pydantic reads `1e+999`, to YAML a text, as infinity.
    if wrong := list(unusable(checked.model_dump())):
        raise _invalid(origin, wrong, "correct these settings, or leave them out")
    if isinstance(checked, RunConfig):
        try:
            check(checked)
        except ValueError as error:
            raise _invalid(origin, [f"configuration: {error}"], remedy) from error
        return cast(S, checked.for_processors())
    return checked


def _with_absolute_store(config: S) -> S:
    """The settings with the default store in full: the next command may be called elsewhere."""
    store = getattr(config, "store", None)
    return config if store is None else config.model_copy(update={"store": location_of(store)})


def _invalid(origin: str, problems: Sequence[str], remedy: str) -> UserError:
    shown = list(problems[:_SHOWN_PROBLEMS])
    if len(problems) > len(shown):
        shown.append(f"and {len(problems) - len(shown)} more")
    return UserError(f"{origin} is not a valid configuration:\n  " + "\n  ".join(shown), remedy)


def read_sections(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The sections of a file laid over the files that it extends; they are not checked.

    Raises:
        UserError: It cannot be read, or extends itself.
    """
    path = path.absolute()
    if path in seen:
        raise UserError(f"{path} extends itself", "remove it from its own `extends`")
    # What a file of another kind holds, such as passwords, is never quoted as unknown settings.
    if path.suffix not in _SUFFIXES:
        raise UserError(
            f"{path} is not a configuration file", f"name a file that ends in {_SUFFIXES[0]}"
        )
    loaded = read_yaml(path)
    if loaded is not None and not isinstance(loaded, dict):
        raise UserError(f"{path} holds no settings", "write `name: value` lines")
    values: dict[str, Any] = loaded or {}
    parents = values.pop("extends", [])
    merged: dict[str, Any] = {}
    named = [parents] if isinstance(parents, str) else parents
    if not isinstance(named, list) or not all(isinstance(parent, str) for parent in named):
        raise UserError(
            f"{path}: extends names no files: {_shown(parents)}", "write `extends: other.yaml`"
        )
    for parent in named:
        _merge(merged, read_sections(path.parent / parent, (*seen, path)))
    anchor_paths(values, path.parent)
    _merge(merged, values)
    return merged


def _merge(values: dict[str, Any], others: Mapping[str, Any]) -> None:
    for name, other in others.items():
        if isinstance(other, dict) and isinstance(values.get(name), dict):
            _merge(values[name], other)
        else:
            values[name] = other


def _apply(values: dict[str, Any], override: str, schema: type[BaseModel]) -> None:
    """Sets what ``NAME=VALUE`` says."""
    name, separator, text = override.partition("=")
    if not separator or not name:
        raise UserError(
            f"--set {_shown(override)} is not NAME=VALUE", "write --set train.kappa=1e-3"
        )
    value = parse_yaml(text, f"the value of --set {_shown(name)}")
    names = name.split(".")
    alone: Any = {}
    _set(alone, names, _as_list(value, schema, name))
    anchor_paths(alone, Path.cwd())
    # A name may be a path, and is absolute now.
    for depth in range(len(names)):
        [(names[depth], alone)] = alone.items()
    _set(values, names, alone)


def _as_list(value: Any, schema: type[BaseModel], name: str) -> Any:
    """One value instead of a list of one; only if the setting is a list."""
    *sections, last = name.split(".")
    field = _fields_at(schema, sections).get(last)
    is_list = field is not None and get_origin(field.annotation) is tuple
    return [value] if is_list and isinstance(value, str | int | float) else value


def _set(values: dict[str, Any], names: list[str], value: Any) -> None:
    holder = values
    *sections, last = names
    for section in sections:
        holder = holder.setdefault(section, {})
        if not isinstance(holder, dict):
            raise UserError(f"{'.'.join(names)}: {section!r} is no section", "check the name")
    holder[last] = value


def _explain(error: dict[str, Any], schema: type[BaseModel]) -> str:
    parts = [str(part) for part in error["loc"]]
    # Where a field takes several kinds of values, pydantic ends with the kind that it has tried.
    if parts and re.fullmatch(r"literal\[.*\]|constrained-(int|float)", parts[-1]):
        parts.pop()
    name = ".".join(parts) or "configuration"
    if error["type"] == "extra_forbidden":
        names = list(_fields_at(schema, parts[:-1]))
        near = _elsewhere(schema, parts) or difflib.get_close_matches(parts[-1], names, n=1)
        setting = OUR_NAMES.get(parts[-1])
        if schema is RunConfig and setting and setting.startswith(".".join(parts[:-1])):
            near = [setting]
        listed = "" if schema is RunConfig else f"; known here: {', '.join(names)}"
        hint = f"; did you mean {near[0]!r}?" if near else listed
        return f"{name}: no such setting{hint}"
    message = str(error["msg"]).removeprefix("Value error, ")
    if isinstance(error["input"], dict | BaseModel):
        return f"{name}: {message}"
    expected = re.findall(r"'([^']*)'", error.get("ctx", {}).get("expected", ""))
    near = difflib.get_close_matches(str(error["input"]), expected, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"{name}: {message}, not {_shown(error['input'])}{hint}"


def _elsewhere(schema: type[BaseModel], parts: Sequence[str]) -> list[str]:
    """Full names of the fields that a name without its section may mean: `kappa`, `train.kappa`."""
    if len(parts) != 1:
        return []
    sections = [name for name in schema.model_fields if parts[0] in _fields_at(schema, [name])]
    return [f"{section}.{parts[0]}" for section in sections]


def _shown(value: Any) -> str:
    """A value as JSON for a message, cut if it is long."""
    return _cut(json.dumps(value, default=str))


def _cut(text: str) -> str:
    text = re.sub(r"(?<=://)[^/\s]*@", "…@", text)  # An address may have a password.
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def _fields_at(model: type[BaseModel], parts: Iterable[str]) -> dict[str, FieldInfo]:
    """Fields of the section at ``parts``; none without the section."""
    for part in parts:
        field = model.model_fields.get(part)
        if field is None or not (
            isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        ):
            return {}
        model = field.annotation
    return model.model_fields
