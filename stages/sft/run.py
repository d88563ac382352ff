"""Stage `sft`: conversations, and a policy or an architecture, to a warm-started checkpoint."""

from stages.harness.context import StageContext
from stages.harness.program import Stage
from stages.sft.params import SftParams
from stages.training.launch import train


def run(ctx: StageContext[SftParams]) -> None:
    """Trains a policy on conversations."""
    train(ctx)


STAGE = Stage(SftParams, run)
