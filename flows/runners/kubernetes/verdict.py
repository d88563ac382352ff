"""Error that the endings of an attempt's pods stand for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flows.runners.base import FailureTail
from flows.runners.kubernetes.diagnosis import Ending
from stages.contract.errors import (
    EXIT_OK,
    EXIT_STOPPED,
    EXIT_USER,
    PreemptedError,
    StageFailedError,
    UserError,
)
from stages.contract.request import Request

# Whichever comes first explains the endings of the others.
_ORDER = ("refused", "taken", "out_of_memory", "full", "overdue", "exited")


def raise_for(
    endings: Sequence[Ending],
    tails: Sequence[FailureTail],
    request: Request,
    *,
    stopped: bool,
    logs: Sequence[Path],
) -> None:
    """Raises the error of an attempt; returns where its first pod ended well.

    Args:
        endings: How each pod ended, the first pod first.
        tails: What each printed last.
        request: What they computed.
        stopped: Whether the run ended them.
        logs: Their logs.
    """
    if endings[0].code == EXIT_OK:
        return
    culprit = min(range(len(endings)), key=lambda each: _rank(endings[each]))
    ending, tail, log = endings[culprit], tails[culprit], logs[culprit]
    if not stopped:
        _raise_for_kind(ending, tail, request, culprit, log)
    code = EXIT_STOPPED if ending.code is None else ending.code
    tail.raise_for(code, request, stopped=stopped, log=str(log))


def _rank(ending: Ending) -> tuple[int, bool, bool, bool]:
    """Order of explanations; among programs, killed ones first, those ended by others last."""
    mistake = ending.kind == "exited" and ending.code == EXIT_USER
    kind = 0 if mistake else _ORDER.index(ending.kind)
    return kind, ending.code in (EXIT_OK, EXIT_STOPPED), not mistake, not ending.is_killed


def _raise_for_kind(
    ending: Ending, tail: FailureTail, request: Request, node: int, log: Path
) -> None:
    where = request.place
    if request.resources.nodes > 1:
        where += f" (node {node + 1} of {request.resources.nodes})"
    last = tuple(tail.lines)
    match ending.kind:
        case "refused":
            raise UserError(
                f"{where}: the image cannot run the stage: {ending.message}",
                "use an image of this project, or one built on top of it",
            )
        case "taken":
            raise PreemptedError(f"{where}: {ending.message.strip(': ')}; log: {log}", last)
        case "out_of_memory":
            tail.raise_out_of_memory(request, ending.code or 0, str(log))
        case "full":
            raise StageFailedError(
                f"{where}: {ending.message}; raise execution.kubernetes.tmp_gib; log: {log}", last
            )
        case "overdue":
            tail.raise_overdue(request, str(log))
