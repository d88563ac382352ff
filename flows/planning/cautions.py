"""Cautions before a run: settings that are valid and cannot work, with the numbers that say so."""

import math
from collections.abc import Iterator

from flows.pipeline.algorithm import ResolvedRun
from flows.pipeline.config import RunConfig
from flows.planning import sizes

# Below it an iteration's training is hardly more than its warm-up.
_FEW_STEPS = 10
# AdamW moves a weight by about the learning rate in a step; the paper's runs move by 8e-5.
_SMALL_MOVE = 1e-5
# With fewer prompts a win rate of 60 % does not differ significantly from one of 50 %.
_FEW_PROMPTS = 64


def cautions(run: ResolvedRun) -> Iterator[str]:
    """Sentences, each with numbers and a remedy; none if nothing is known to be wrong."""
    config = run.config
    yield from _unread(config)
    data = sizes.rows_of(run.inputs["prompts"])
    prompts = math.floor(sizes.train_prompts(config, data) or 0)
    yield from _training(config, prompts * config.pair.pairs_per_prompt)
    test = sizes.rows_of(run.inputs["test_prompts"])
    where = "inputs" if config.inputs.test_prompts else "prepare"
    held_out = 0 if config.inputs.test_prompts else config.prepare.test_prompts
    if test is not None:
        held_out = test.number
    # None at all is an error of `prepare`.
    if 0 < held_out < _FEW_PROMPTS:
        yield (
            f"{held_out:g} held-out prompts tell little: the win rate is known to "
            f"±{98 / math.sqrt(held_out):.0f} points. Raise {where}.test_prompts to {_FEW_PROMPTS} "
            "or more"
        )


def _unread(config: RunConfig) -> Iterator[str]:
    """Files of a person's code that the settings of this run leave out; a sweep may vary them."""
    for name, setting, value in (
        ("objective_code", "train.objective", config.train.objective),
        ("strategy_code", "pair.strategy", config.pair.strategy),
    ):
        if value != "python" and getattr(config.inputs, name):
            yield f"inputs.{name} is not read: {setting} is {value}. Set it to python"


def _training(config: RunConfig, pairs: int) -> Iterator[str]:
    train = config.train
    if config.pair_data == "accumulate":
        pairs *= config.iterations
    steps = math.ceil(pairs / train.global_batch_pairs) * train.epochs
    if not steps:
        return
    if steps < _FEW_STEPS:
        yield (
            f"train takes {steps} steps in an iteration: at most {pairs} pairs in batches of "
            f"{train.global_batch_pairs}, {train.epochs} epochs. Lower train.global_batch_pairs, "
            "or bring more prompts"
        )
    move = steps * config.iterations * train.learning_rate
    if move < _SMALL_MOVE:
        yield (
            f"train hardly moves the policy: train.learning_rate is {train.learning_rate:g}, and "
            f"{steps * config.iterations} steps in all change a weight by {move:.0e} or so. "
            "Raise it, or take more steps"
        )
