"""Number of shards of a sampling, where the configuration leaves it to what there is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flows.pipeline.placement import ON_THIS_MACHINE

AUTO = "auto"


def resolve_shards(values: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration, as written, with a number for each ``num_shards: auto``.

    The number is part of the keys of what is sampled, so it follows from the configuration alone
    and not from the machine on which that is read: one shard on one machine, whose engines use all
    its devices; on a cluster as many as stages may run at once.

    >>> resolve_shards(
    ...     {
    ...         "generate": {"num_shards": "auto"},
    ...         "execution": {"runner": "slurm", "parallel": 4},
    ...     }
    ... )["generate"]
    {'num_shards': 4}
    """
    execution = values.get("execution")
    given = execution if isinstance(execution, Mapping) else {}
    # There one shard takes all devices that it is given.
    on_one = given.get("runner", "process") in ON_THIS_MACHINE
    number = 1 if on_one else given.get("parallel", 1)
    resolved = dict(values)
    for section in ("generate", "evaluation"):
        resolved[section] = _resolved(values.get(section), number)
    suites = values.get("suites")
    if isinstance(suites, Mapping):
        resolved["suites"] = {name: _resolved(each, number) for name, each in suites.items()}
    return {name: each for name, each in resolved.items() if name in values}


def _resolved(section: Any, number: Any) -> Any:
    if isinstance(section, Mapping) and section.get("num_shards") == AUTO:
        return {**section, "num_shards": number}
    return section
