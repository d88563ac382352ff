"""Screen: prompts, and a policy's scored responses to them, to the prompts that it does not solve.

Memory holds 16 bytes and some overhead for each solved prompt.
"""

import numpy as np

from stages.contract.errors import UserError
from stages.harness.context import StageContext
from stages.harness.program import Stage
from stages.screen.params import ScreenParams
from stages.tables.join import read_scored
from stages.tables.schemas import PROMPTS, TableWriter, num_rows, read_rows


def run(ctx: StageContext[ScreenParams]) -> None:
    """Writes the unsolved prompts in their order.

    Inputs: ``prompts`` (a PROMPTS table), ``responses`` and ``scores`` (shard by shard). Outputs:
    ``prompts.parquet`` and ``metrics.json``. A prompt without responses (too long for the context)
    or without scores is not known to be solved, and stays.
    """
    prompts = ctx.path("prompts")
    total = num_rows(prompts)
    solved = _solved(ctx)
    with TableWriter(ctx.out / "prompts.parquet", PROMPTS) as writer:
        for done, row in enumerate(read_rows(prompts, PROMPTS), 1):
            if bytes.fromhex(row["prompt_id"]) not in solved:
                writer.write(row)
            ctx.events.progress(done, total, "prompts")
    report = {"prompts": total, "solved": total - writer.num_rows, "kept": writer.num_rows}
    ctx.write_json("metrics.json", report)
    if writer.num_rows == 0:
        raise UserError(
            f"the starting policy solves all {total} prompts: nothing is left to train on",
            "use harder prompts, lower screen.num_samples, or raise screen.solved_score",
        )
    ctx.events.info(
        f"dropped {report['solved']} of {total} prompts: the starting policy solves them"
    )


def _solved(ctx: StageContext[ScreenParams]) -> set[bytes]:
    """Ids of the prompts with a response that scores well enough."""
    solved = set()
    for batch in read_scored(ctx.paths("responses"), ctx.paths("scores"), columns=()):
        # NaN, for a missing score, is not greater than anything.
        scores = batch.scores.to_numpy(zero_copy_only=False)
        enough = np.greater_equal(scores, ctx.params.solved_score)
        for prompt_id, start, stop in batch.prompts():
            if enough[start:stop].any():
                solved.add(bytes.fromhex(prompt_id))
    return solved


STAGE = Stage(ScreenParams, run)
