"""Runs of a schedule that are each a run of its own: a dated name, and a seed of the date. Pure."""

from __future__ import annotations

import datetime

from flows.pipeline.config import RunConfig

_STAMP = "%Y%m%d-%H%M%S"
_MAX_NAME = 100


def fresh_run(config: RunConfig, start: datetime.datetime) -> RunConfig:
    """The configuration of one run of a schedule.

    Its name gets the start, its seed is the configuration's plus the start as a number. The model
    in the registry keeps its name, so that each run adds a version.

    Args:
        config: What all runs of the schedule have in common.
        start: Start that the run was scheduled for, which a retry does not change.
    """
    stamp = start.astimezone(datetime.UTC).strftime(_STAMP)
    name = config.name[: _MAX_NAME - len(stamp) - 1]
    changed = {
        "name": f"{name}-{stamp}",
        "seed": config.seed + int(stamp.replace("-", "")),
        "model": config.model or config.name,
    }
    return config.model_copy(update=changed)
