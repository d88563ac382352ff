"""Strict YAML: plain values only, each key once, of bounded depth and size."""

import itertools
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from stages.contract.errors import UserError

# Far above any configuration of a person; below it Python's own recursion limit is not met.
_MAX_DEPTH = 50
# Aliases are expanded, so that a small file can stand for an endless one.
_MAX_VALUES = 100_000


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which refuses a key that stands twice in one mapping."""

    _num_merged = 0

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Composes a mapping, before merge keys (`<<`) bring in those of other mappings."""
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.composer.ComposerError(
                        None, None, f"{key.value!r} is set twice", key.start_mark
                    )
                seen.add(key.value)
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Brings in merge keys, up to a number of values: they multiply with each level."""
        super().flatten_mapping(node)
        self._num_merged += len(node.value)
        if self._num_merged > _MAX_VALUES:
            raise yaml.constructor.ConstructorError(
                None, None, f"more than {_MAX_VALUES} values, merge keys expanded", node.start_mark
            )


# As in YAML 1.2. PyYAML's are those of 1.1, where `off` is a truth value, `010` is 8, `1:30` is 90,
# `1e-3` is a text and `2026-11-26` none. Settings that are truth values take `off` all the same.
_PLAIN = {
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+0123456789.",
    ),
    "timestamp": (r"(?!)", ""),
}
_Loader.yaml_implicit_resolvers = {
    first: [each for each in resolvers if each[0].rpartition(":")[2] not in _PLAIN]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _kind, (_pattern, _first) in _PLAIN.items():
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_kind}", re.compile(f"^(?:{_pattern})$"), list(_first)
    )


def _int(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


_Loader.add_constructor("tag:yaml.org,2002:int", _int)


def read_yaml(path: Path) -> Any:
    """Reads one YAML document from a file as :func:`parse_yaml` does; UserError if it cannot."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"cannot read the configuration {path}: {error.strerror}", "check the path"
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}",
            "save the file as UTF-8",
        ) from error
    return parse_yaml(text, str(path))


def parse_yaml(text: str, place: str) -> Any:
    """Parses one YAML document; no part of the result is shared with another.

    Raises:
        UserError: It is not YAML, sets a key twice, or is nested or expanded beyond all measure.
    """
    try:
        return _copied(yaml.load(text, _Loader), place, itertools.count())
    except (yaml.YAMLError, ValueError) as error:
        # Python's own error is that of an integer of thousands of digits.
        raise UserError(f"{place} is not YAML: {error}", "correct it") from error
    except RecursionError as error:
        raise _too_large(place, f"nested deeper than {_MAX_DEPTH} levels") from error


def unusable(values: Any, name: str = "") -> Iterator[str]:
    """Yields what is wrong with each number that is not finite and each text with a NUL."""
    if isinstance(values, dict):
        for key, value in values.items():
            yield from unusable(value, f"{name}.{key}" if name else str(key))
    elif isinstance(values, list | tuple):
        for index, value in enumerate(values):
            yield from unusable(value, f"{name}.{index}")
    elif isinstance(values, float) and not math.isfinite(values):
        yield f"{name}: {values} is no finite number"
    elif isinstance(values, str) and "\0" in values:
        yield f"{name}: {values!r} has a NUL, which no file, program or server takes"


def _copied(value: Any, place: str, number: Iterator[int], depth: int = 0) -> Any:
    if depth > _MAX_DEPTH:
        raise _too_large(place, f"nested deeper than {_MAX_DEPTH} levels")
    if next(number) >= _MAX_VALUES:
        raise _too_large(place, f"more than {_MAX_VALUES} values, aliases expanded")
    if isinstance(value, dict):
        return {key: _copied(each, place, number, depth + 1) for key, each in value.items()}
    if isinstance(value, list):
        return [_copied(each, place, number, depth + 1) for each in value]
    return value


def _too_large(place: str, why: str) -> UserError:
    return UserError(f"{place} is no configuration: {why}", "write it without such nesting")
