"""Preferences: a data set of preferences in, ``pairs.parquet`` out, in the policy's tokens.

Kept are the pairs of an iteration's prompts, so that held-out prompts stay held out. Rows stream.
"""

import math
from collections import Counter
from typing import Any

from stages.contract.digests import prompt_id
from stages.contract.errors import UserError, located
from stages.harness.context import StageContext
from stages.harness.program import Stage
from stages.modeling.chat import load_chat_tokenizer, render_answered
from stages.modeling.sources import open_source
from stages.preferences.params import PreferencesParams
from stages.preferences.rows import Preference, read_preference
from stages.tables.schemas import PAIRS, PROMPTS, TableWriter, read_rows


def run(ctx: StageContext[PreferencesParams]) -> None:
    """Writes a pair for each row of the data whose prompt is among the iteration's."""
    tokenizer = load_chat_tokenizer(ctx.model("policy"))
    prompts = {
        row["prompt_id"] for row in read_rows(ctx.path("prompts"), PROMPTS, columns=["prompt_id"])
    }
    counts = Counter(rows=0, pairs=0, ties=0, reversed=0, other_prompts=0)
    [data] = ctx.inputs["data"]
    source = open_source(data, subset=ctx.params.subset, split=ctx.params.split)
    with TableWriter(ctx.out / "pairs.parquet", PAIRS) as writer:
        for place, row in source.read():
            counts["rows"] += 1
            ctx.events.progress(min(counts["rows"], source.num_rows), source.num_rows, "rows")
            with located(place):
                try:
                    preference = read_preference(row, ctx.params)
                except UserError:
                    if ctx.params.invalid_rows == "refuse":
                        raise
                    counts["invalid_rows"] += 1
                    continue
                pair = _pair(tokenizer, preference, ctx.params, prompts, counts)
            if pair is not None:
                writer.write(pair)
    if not counts["pairs"]:
        remedy = "name the data set as inputs.prompts as well, or leave inputs.prompts out"
        if counts["rows"] > 2 * counts["other_prompts"]:
            remedy = "correct the columns chosen and rejected, or their scores"
        raise UserError(
            f"none of {counts['rows']} rows makes a pair: {counts['invalid_rows']} hold no "
            f"preference, {counts['ties']} are ties, in {counts['reversed']} the rejected response "
            f"has the higher score, and the prompts of {counts['other_prompts']} are not among the "
            "iteration's",
            remedy,
        )
    ctx.write_json("metrics.json", counts)


def _pair(
    tokenizer: Any,
    preference: Preference,
    params: PreferencesParams,
    prompts: set[str],
    counts: Counter[str],
) -> dict[str, Any] | None:
    """The row of a preference; None, counted, for one that makes no pair."""
    identity = prompt_id(preference.messages)
    if identity not in prompts:
        counts["other_prompts"] += 1
        return None
    better, worse = preference.scores
    if better < worse:
        counts["reversed"] += 1
        return None
    row: dict[str, Any] = {"prompt_id": identity, "prompt": preference.messages, "tie": False}
    for index, side in enumerate(("chosen", "rejected")):
        text = getattr(preference, side)
        prompt, answer = render_answered(tokenizer, preference.messages, text, params)
        row |= {
            "prompt_token_ids": prompt,
            side: [{"role": "assistant", "content": text}],
            f"{side}_sample_index": index,
            f"{side}_token_ids": answer,
            # No policy of ours sampled them.
            f"{side}_logprobs": [math.nan] * len(answer),
            f"{side}_finish_reason": "stop",
            f"{side}_score": preference.scores[index],
        }
    # Different texts may have the same tokens, between which no training distinguishes.
    if better == worse or row["chosen_token_ids"] == row["rejected_token_ids"]:
        counts["ties"] += 1
        return None
    counts["pairs"] += 1
    return row


STAGE = Stage(PreferencesParams, run)
