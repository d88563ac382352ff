"""Answers of the API server that creates no pod, as errors for a person. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal

from flows.runners.kubernetes.client import RIGHTS_REMEDY
from stages.contract.errors import StageFailedError, UserError

_QUOTA = re.compile(r"exceeded quota: (\S+), requested: (\S+), used: (\S+), limited: (\S+)")
_UNQUOTED = re.compile(r"failed quota: (\S+): must specify (\S+)")
_NO_RIGHT = re.compile(r'cannot (\w+) resource "([^"]+)"')
_QUANTITY = re.compile(r"([0-9.]+)([a-zA-Z]*)")
_UNITS: Mapping[str, Decimal] = {
    "": Decimal(1),
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    **{unit: Decimal(1000) ** power for power, unit in enumerate("kMGTPE", 1)},
    **{f"{unit}i": Decimal(1024) ** power for power, unit in enumerate("KMGTPE", 1)},
}


class QuotaInUseError(StageFailedError):
    """Other pods use up the namespace's quota for now."""


def refused(status: int, said: str, where: str, stage: str) -> UserError | StageFailedError:
    """The error for a pod that the API server did not create.

    Args:
        status: HTTP status of its answer.
        said: Its words.
        where: Step, for the message.
        stage: Stage.
    """
    quota = _QUOTA.search(said)
    if quota is not None:
        name, requested, used, limited = quota.groups()
        message = (
            f"{where}: the quota {name!r} of the namespace does not allow the pod: it asks for "
            f"{requested}, in use are {used}, the limit is {limited}"
        )
        if _fits_alone(requested, limited):
            return QuotaInUseError(message)
        return UserError(message, f"lower resources.{stage}, or have the quota raised")
    unquoted = _UNQUOTED.search(said)
    if unquoted is not None:
        return UserError(
            f"{where}: the quota {unquoted[1]!r} of the namespace wants {unquoted[2]} to be given",
            f"set resources.{stage}.cpus and resources.{stage}.memory_gib",
        )
    right = _NO_RIGHT.search(said)
    if right is not None:
        return UserError(
            f"{where}: the orchestrator may not {right[1]} {right[2]}: {said}",
            RIGHTS_REMEDY,
        )
    message = f"{where}: the cluster refuses the pod: {said}"
    if 400 <= status < 500 and status not in (408, 409, 429):
        return UserError(message, "correct execution.kubernetes or resources, or what they name")
    return StageFailedError(message)


def _fits_alone(requested: str, limited: str) -> bool:
    limits = _amounts(limited)
    # A limit that is written otherwise (`1e3`) is not known to be exceeded.
    return all(amount <= limits.get(name, amount) for name, amount in _amounts(requested).items())


def _amounts(text: str) -> dict[str, Decimal]:
    """``pods=1,limits.memory=2Gi`` as numbers."""
    found = {}
    for each in text.split(","):
        name, _, amount = each.partition("=")
        matched = _QUANTITY.fullmatch(amount)
        if matched is not None:
            found[name] = Decimal(matched[1]) * _UNITS[matched[2]]
    return found
