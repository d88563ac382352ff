"""Stage `train`: request to artifact."""

from stages.contract.adapters import write_base
from stages.harness.context import StageContext
from stages.harness.program import Stage
from stages.train.params import TrainParams
from stages.training.launch import train


def run(ctx: StageContext[TrainParams]) -> None:
    """Trains a policy on preference pairs."""
    train(ctx)
    if ctx.params.lora.save == "adapter":
        write_base(ctx.out / "checkpoint", ctx.inputs["policy"][0].source)


STAGE = Stage(TrainParams, run)
