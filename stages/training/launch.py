"""Start of a training by its stage: in this process, or in a worker process for each device.

Every process of a training has the context of the stage call. A training that lacks memory starts
again with half the tokens.
"""

import gc
import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from stages.contract.errors import UserError
from stages.contract.events import Emitter
from stages.contract.request import Request
from stages.harness.context import ResolvedInput, StageContext
from stages.harness.program import deferred_stop
from stages.store.base import Store
from stages.training.params import TrainingParams

P = TypeVar("P", bound=TrainingParams)


def train(ctx: StageContext[P]) -> None:
    """Trains; anew with half the tokens at once if memory did not suffice.

    Raises:
        UserError: Parameters, models or data are wrong, or memory never suffices.
        StoppedError: SIGTERM came; a checkpoint is saved.
        StageFailedError: A worker failed.
    """
    ctx.telemetry_path("metrics.jsonl")
    while True:
        try:
            _train_once(ctx)
            return
        except OutOfMemoryError as error:
            # Another node's program has ended with its workers and would not come again.
            if error.smaller is None or ctx.request.resources.nodes > 1:
                raise
            said, smaller = error.said, error.smaller
        # Memory of the failed attempt is released only now that its exception is gone.
        gc.collect()
        ctx.events.warning(
            f"out of memory ({said}): going on with micro_batch_tokens = {smaller} in place of "
            f"{ctx.params.micro_batch_tokens}"
        )
        params = ctx.params.model_copy(update={"micro_batch_tokens": smaller})
        ctx = replace(ctx, params=params)


def _train_once(ctx: StageContext[Any]) -> None:
    resources = ctx.request.resources
    if resources.world_size == 1 and not ctx.params.needs_workers:
        from stages.training.engine import Process
        from stages.training.fit import run_fit

        with deferred_stop() as stop:
            run_fit(ctx, Process(0, 0, 1, ctx.events, stop.is_set))
        return
    from stages.training.node import host

    with host(ctx.work, resources, dump_call(ctx)) as node:
        if resources.nodes > 1:
            ctx.events.info(
                f"waiting for {resources.nodes - 1} times "
                f"`python -m stages.training.node {ctx.work}`"
            )
        node.train(ctx.events)


class _Call(BaseModel):
    """A stage call as the workers get it: with this attempt's parameters, and inputs found."""

    request: Request
    inputs: dict[str, tuple[ResolvedInput, ...]]
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
        store=Store.open(call.request.store),
        events=events,
        inputs=call.inputs,
    )


class OutOfMemoryError(UserError):
    """Training did not fit into memory."""

    said: str
    """Message of the allocator, and the process that it came from."""
    smaller: int | None
    """A budget of tokens with which it may fit; None if a smaller one would not help."""
