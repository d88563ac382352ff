"""A case of a bad input, and the answer of ``geb``."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
import time
from dataclasses import dataclass
from typing import Literal

from stages.contract.errors import EXIT_OK, EXIT_USER
from tests.forking import forked_python

_LIMIT_SECONDS = 30
_MOST_CHARACTERS = 4000
# Exit code of a program that `timeout` ends.
_OVERDUE = 124
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_ERROR = re.compile(r"^error ", re.MULTILINE)
_REMEDY = re.compile(r"^remedy \S", re.MULTILINE)


@dataclass(frozen=True)
class Case:
    """A bad input.

    Attributes:
        kind: Kind of input.
        name: The damage.
        arguments: Arguments of ``geb``, the command first.
        says: Texts that the message must have: the value and its place.
        by: The command that must refuse the input: the one of ``arguments``; ``run`` if ``plan``,
            which is tried before it, may accept the input; None if both must accept it.
        why: Why it is right to accept it.
        code: Exit code of the refusal: 1 if the file system may come back when it is tried again.
    """

    kind: str
    name: str
    arguments: list[str]
    says: tuple[str, ...] = ()
    by: Literal["itself", "run"] | None = "itself"
    why: str = ""
    code: int = EXIT_USER


@dataclass(frozen=True)
class Outcome:
    """A case with what ``geb`` answered.

    Attributes:
        case: The case.
        codes: Exit code of each command that was tried, in order.
        seconds: Wall time of all commands.
        output: What the last one printed; of ``plan`` and ``run``, which are asked for JSON on
            stdout, the messages on stderr.
        faults: Faults of the answer, in words; none if it is right.
    """

    case: Case
    codes: list[int]
    seconds: float
    output: str
    faults: list[str]


def tried(case: Case) -> Outcome:
    """Tries a case; ``geb``, and the stages that it starts, are forks of loaded libraries."""
    codes = []
    faults = []
    output = ""
    started = time.monotonic()
    commands = [case.arguments]
    if case.by != "itself":
        commands.append(["run", *case.arguments[1:]])
    for arguments in commands:
        # A run that is accepted goes to its end.
        limit = _LIMIT_SECONDS if case.by else 4 * _LIMIT_SECONDS
        code, document, output = geb(arguments, limit)
        codes.append(code)
        if document and not _is_json(document):
            faults.append("no JSON on stdout")
        if code != EXIT_OK:
            break
    seconds = round(time.monotonic() - started, 2)
    return Outcome(case, codes, seconds, output, faults + _faults(case, codes, output))


def geb(arguments: list[str], limit_seconds: float | None = _LIMIT_SECONDS) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of ``geb``; of what it refuses stdout has nothing to read."""
    # The others do not all have the option.
    as_json = ["--json"] if arguments[0] in ("plan", "run") else []
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            done = subprocess.run(
                [forked_python(), "-m", "flows.commands.cli", *arguments, *as_json],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                timeout=limit_seconds,
                check=False,
                env=os.environ,
            )
            code = done.returncode
        except subprocess.TimeoutExpired:
            code = _OVERDUE
        lines = []
        for stream in (out, err):
            stream.seek(0)
            lines.append(stream.read().decode(errors="replace").strip())
    return (code, *lines) if as_json else (code, "", "\n".join(lines))


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _faults(case: Case, codes: list[int], output: str) -> list[str]:
    """Faults of an answer."""
    expected = {
        "itself": [[case.code]],
        "run": [[case.code], [EXIT_OK, case.code]],
        None: [[EXIT_OK, EXIT_OK]],
    }[case.by]
    faults = [] if codes in expected else [f"exit codes {codes}, not {expected[-1]}"]
    if "Traceback" in output:
        faults.append("a traceback")
    if "\x1b[2J" in output:
        faults.append("an escape sequence")
    if case.by is None:
        return faults
    shown = _ANSI.sub("", output)
    if not _REMEDY.search(shown):
        faults.append("no remedy")
    if (count := len(_ERROR.findall(shown))) != 1:
        faults.append(f"{count} errors")
    message = " ".join(shown.split())
    faults += [f"{text!r} is not named" for text in case.says if text not in message]
    if len(output) > _MOST_CHARACTERS:
        faults.append(f"{len(output)} characters")
    return faults
