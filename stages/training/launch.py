"""Start of a training by its stage: in this process, or in a worker process for each device.

Every process of a training has the context of the stage call.
"""

import importlib
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from stages.contract.events import Emitter
from stages.contract.request import Request
from stages.harness.context import FoundInput, StageContext
from stages.harness.program import deferred_stop
from stages.store.base import Store
from stages.training.params import P


def train(ctx: StageContext[P]) -> None:
    """Trains.

    Raises:
        UserError: Parameters, models or data are wrong, or memory does not suffice.
        StoppedError: SIGTERM came; a checkpoint is saved.
        StageFailedError: A worker failed.
    """
    ctx.telemetry.add("metrics.jsonl")
    resources = ctx.request.resources
    # DeepSpeed wants a process group, of a single process too.
    if resources.world_size == 1 and ctx.params.deepspeed.zero_stage == "off":
        from stages.training.engine import Process

        with deferred_stop() as stop_requested:
            fit_of(ctx)(ctx, Process(0, 0, 1, ctx.events, stop_requested)).run()
        return
    from stages.training.node import host

    node = host(ctx.work, resources, dump_call(ctx))
    if resources.nodes > 1:
        ctx.events.info(
            f"waiting for {resources.nodes - 1} times "
            f"`python -P -m stages.training.node {ctx.work}`"
        )
    node.train(ctx.events)


def fit_of(ctx: StageContext[Any]) -> Any:
    """The stage's :class:`stages.training.fit.Fit`, which loads torch."""
    return importlib.import_module(f"stages.{ctx.params.stage}.fit").FIT


class _Call(BaseModel):
    """A stage call as the workers get it, with inputs found."""

    request: Request
    inputs: dict[str, tuple[FoundInput, ...]]
    out: Path


def dump_call(ctx: StageContext[Any]) -> str:
    """The stage call as text, for :func:`load_call` on any node."""
    now = {"params": ctx.params.model_dump(mode="json"), "store": ctx.store.location}
    request = ctx.request.model_copy(update=now)
    return _Call(request=request, inputs=dict(ctx.inputs), out=ctx.out).model_dump_json()


def load_call(text: bytes, events: Emitter) -> StageContext[Any]:
    """The context of a stage call in a worker, whose events go to ``events``."""
    call = _Call.model_validate_json(text)
    stage = importlib.import_module(f"stages.{call.request.stage}.run").STAGE
    return StageContext(
        call.request,
        params=stage.params.model_validate(call.request.params),
        out=call.out,
        store=Store.in_folder(call.request.store),
        events=events,
        inputs=call.inputs,
    )
