"""A case of a bad input, and what ``geb`` made of it."""

from __future__ import annotations

import os
import re
import subprocess
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
        name: What is bad.
        arguments: Arguments of ``geb``, the command first.
        says: Texts that the message must have: the value and its place.
        by: The command that must refuse the input: the one of ``arguments``; ``run`` if ``plan``,
            which is tried before it, must not read as much as the refusal needs; None if the input
            must be accepted by both.
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
        output: What the last one printed, stdout and stderr together.
        faults: What is wrong with the answer, in words; none if it is right.
    """

    case: Case
    codes: list[int]
    seconds: float
    output: str
    faults: list[str]


def tried(case: Case) -> Outcome:
    """Tries a case; ``geb``, and the stages that it starts, are forks of loaded libraries."""
    codes, started = [], time.monotonic()
    commands = [case.arguments]
    if case.by != "itself":
        commands.append(["run", *case.arguments[1:]])
    for arguments in commands:
        code, output = geb(arguments)
        codes.append(code)
        if code != EXIT_OK:
            break
    seconds = round(time.monotonic() - started, 2)
    return Outcome(case, codes, seconds, output, _faults(case, codes, output))


def geb(arguments: list[str]) -> tuple[int, str]:
    """Exit code and output of ``geb``."""
    try:
        done = subprocess.run(
            [forked_python(), "-m", "flows.commands.cli", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_LIMIT_SECONDS,
            check=False,
            env=os.environ,
        )
    except subprocess.TimeoutExpired as late:
        return _OVERDUE, (late.stdout or b"").decode(errors="replace").strip()
    return done.returncode, done.stdout.decode(errors="replace").strip()


def _faults(case: Case, codes: list[int], output: str) -> list[str]:
    """What is wrong with an answer."""
    wanted = {"itself": [case.code], "run": [EXIT_OK, case.code], None: [EXIT_OK, EXIT_OK]}[case.by]
    faults = [] if codes == wanted else [f"exit codes {codes}, not {wanted}"]
    if "Traceback" in output:
        faults.append("a traceback")
    if "\x1b[2J" in output:
        faults.append("an escape sequence")
    if case.by is None:
        return faults
    said = _ANSI.sub("", output)
    if not _REMEDY.search(said):
        faults.append("no remedy")
    if (count := len(_ERROR.findall(said))) != 1:
        faults.append(f"{count} errors")
    message = " ".join(said.split())
    faults += [f"{each!r} is not named" for each in case.says if each not in message]
    if len(output) > _MOST_CHARACTERS:
        faults.append(f"{len(output)} characters")
    return faults
