"""Strict YAML 1.2: plain values only, each key once, of bounded size."""

import json
import re
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import AliasEvent

from stages.contract.errors import UserError

# Far above any configuration of a person.
_MAX_CHARACTERS = 1_000_000
_MAX_ALIASES = 20
# The parser's time grows with the square of this nesting.
_DEEP = re.compile(r"(?:\[[^\[\]]*){200}")
# As JSON writes it, and not a text that spells these characters after a backslash.
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


class _Constructor(SafeConstructor):
    """Leaves dates as the texts that they are in YAML 1.2."""


_Constructor.add_constructor("tag:yaml.org,2002:timestamp", SafeConstructor.construct_yaml_str)


def read_yaml(path: Path) -> Any:
    """Reads one YAML document from a file as :func:`parse_yaml` does; UserError if it cannot."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"cannot read the configuration {path}: {error.strerror}", "check the path"
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error}", "save the file as UTF-8") from error
    return parse_yaml(text, str(path))


def parse_yaml(text: str, origin: str) -> Any:
    """Parses one YAML document; no part of the result is shared with another.

    Raises:
        UserError: It is not YAML, sets a key twice, is too large, or holds other than plain values.
    """
    try:
        if len(text) > _MAX_CHARACTERS:
            raise ValueError(f"{len(text)} characters, more than {_MAX_CHARACTERS}")
        if _DEEP.search(text):
            raise RecursionError
        reader = YAML(typ="safe", pure=True)
        reader.Constructor = _Constructor
        # A few lines of aliases of aliases would fill the memory.
        if sum(isinstance(event, AliasEvent) for event in reader.parse(text)) > _MAX_ALIASES:
            raise ValueError(f"more than {_MAX_ALIASES} aliases")
        document = json.dumps(reader.load(text))
        if _NUL.search(document):
            raise ValueError("a text has a NUL, which no file, program or server takes")
        return json.loads(document)
    except (YAMLError, ValueError, TypeError) as error:
        # Python's own errors are about values that JSON lacks, and very long integers.
        fault = str(error)
        if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
            fault = f"{error.problem}, line {error.problem_mark.line + 1}"
        raise UserError(f"{origin} is not valid YAML: {fault}", "correct it") from error
    except RecursionError as error:
        raise UserError(f"{origin} is nested too deep", "write it without such nesting") from error
