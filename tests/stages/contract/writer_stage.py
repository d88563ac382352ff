"""A stage that writes a few files, for tests of the store and of the stage program."""

import io
from typing import ClassVar

from stages.contract.events import Emitter
from stages.contract.params import StageParams
from stages.contract.request import make_request
from stages.harness.program import Stage, execute


class WriterParams(StageParams):
    """Parameters of the stage."""

    stage: ClassVar[str] = "writer"
    version: ClassVar[str] = "1"

    text: str = "content"


FILES = ("metrics.json", "rows.jsonl", "checkpoint/config.json", "checkpoint/model.safetensors")


def write_files(ctx):
    (ctx.out / "checkpoint").mkdir()
    for name in FILES:
        (ctx.out / name).write_text(f"{name}: {ctx.params.text}\n")
    ctx.telemetry.add("timings.json")
    (ctx.out / "timings.json").write_text("{}")


WRITER = Stage(WriterParams, write_files)


def request(store, text="content"):
    return make_request(WriterParams(text=text), inputs={}, seed=0, store=str(store.root))


def compute(store, stage=WRITER, text="content", events=None):
    return execute(stage, request(store, text), events or Emitter(io.StringIO()))
