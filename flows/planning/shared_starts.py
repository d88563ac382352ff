"""Steps that find an engine already started: the program of an earlier step computes them, too."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from flows.execution.joined_steps import engine_of
from flows.pipeline.step import Step
from stages.contract.request import Resources


def steps_with_engine(
    steps: Sequence[Step], todo: Collection[str], resources: Mapping[str, Resources]
) -> dict[str, str]:
    """Steps that another one's program computes with its engine, as runs on one machine join them.

    A step joins an earlier one with an equal engine if all that it reads comes before that one.

    Args:
        steps: Steps of a run, in the order in which they are computed.
        todo: Names of those that are to be computed.
        resources: Resources by stage.

    Returns:
        For each such step the step before it in the same program, by name.
    """
    before: dict[str, str] = {}
    # The place of each program's first step, the name of the last one so far, and their engine.
    programs: list[tuple[int, str, Any]] = []
    places: dict[str, int] = {}
    for place, step in enumerate(steps):
        places[step.name] = place
        engine = engine_of(step, step.inputs, resources[step.stage])
        if step.name not in todo or engine is None:
            continue
        ready = max((places[each] for each in step.upstream() if each in todo), default=-1)
        for number, (first, last, its_engine) in enumerate(programs):
            if its_engine == engine and ready < first:
                before[step.name] = last
                programs[number] = first, step.name, engine
                break
        else:
            programs.append((place, step.name, engine))
    return before
