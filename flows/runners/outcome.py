"""Endings of an attempt's nodes at a place beyond this host, and the error that they stand for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flows.runners.base import FailureTail, is_killed
from stages.contract.errors import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_STOPPED,
    EXIT_USER,
    PreemptedError,
    StageFailedError,
    UserError,
)
from stages.contract.request import Request

Kind = Literal["refused", "taken", "out_of_memory", "overdue", "failed", "exited"]
# Whichever comes first explains the endings of the others.
_ORDER: tuple[Kind, ...] = ("refused", "taken", "out_of_memory", "failed", "overdue", "exited")


@dataclass(frozen=True)
class Ending:
    """End of one node's part of a stage: of its container, its pod or its job.

    Attributes:
        kind: ``exited``: by itself; ``out_of_memory``: killed at its limit; ``overdue``: its time
            limit; ``taken``: the place took its machine; ``refused``: a person has to change
            something; ``failed``: something else, which the message tells.
        code: Exit code, if its program had one.
        message: The place's words.
        remedy: What a person can do.
    """

    kind: Kind
    code: int | None = None
    message: str = ""
    remedy: str = ""

    @property
    def is_killed(self) -> bool:
        """True if a signal that was not the wish to stop ended the program."""
        return self.kind == "exited" and is_killed(self.code or 0)

    @property
    def is_cause(self) -> bool:
        """True if no other node's failure can be the reason: connections end with a node."""
        return self.kind != "exited" or self.is_killed or self.code == EXIT_USER

    def or_taken(self, why: Callable[[], str]) -> Ending:
        """This ending of a node that was deleted: ``taken``, unless its program ended by itself."""
        if self.kind == "exited" and self.code not in (EXIT_OK, EXIT_FAILED, EXIT_USER):
            return Ending("taken", self.code, why())
        return self


def raise_for(
    endings: Sequence[Ending],
    tails: Sequence[FailureTail],
    request: Request,
    *,
    stopped: bool,
    logs: Sequence[Path],
) -> None:
    """Raises the error of an attempt; returns if its first node ended well.

    Args:
        endings: How each node ended, the first one first.
        tails: What each printed last.
        request: What they computed.
        stopped: Whether the run ended them.
        logs: Their logs.
    """
    if endings[0] == Ending("exited", EXIT_OK):
        return
    culprit = min(range(len(endings)), key=lambda each: _rank(endings[each]))
    ending, tail, log = endings[culprit], tails[culprit], logs[culprit]
    if not stopped:
        _raise_for_kind(ending, tail, request, culprit if len(endings) > 1 else None, log)
    code = EXIT_STOPPED if ending.code is None else ending.code
    tail.raise_for(code, request, stopped=stopped, log=str(log))


def _rank(ending: Ending) -> tuple[int, bool, bool, bool]:
    """Order of explanations; among programs, killed ones first, those ended by others last."""
    mistake = ending.kind == "exited" and ending.code == EXIT_USER
    kind = 0 if mistake else _ORDER.index(ending.kind)
    return kind, ending.code in (EXIT_OK, EXIT_STOPPED), not mistake, not ending.is_killed


def _raise_for_kind(
    ending: Ending, tail: FailureTail, request: Request, node: int | None, log: Path
) -> None:
    where = f"{request.place} ({request.stage} {request.key[:12]})"
    if node is not None:
        where += f" (node {node + 1} of {request.resources.nodes})"
    last = tuple(tail.lines)
    match ending.kind:
        case "refused":
            raise UserError(f"{where}: {ending.message}", ending.remedy)
        case "taken":
            raise PreemptedError(f"{where}: {ending.message.strip(': ')}; log: {log}", last)
        case "out_of_memory":
            tail.raise_out_of_memory(request, ending.code or 0, str(log))
        case "failed":
            raise StageFailedError(f"{where}: {ending.message}; log: {log}", last)
        case "overdue":
            tail.raise_overdue(request, str(log))
