"""Cautions before a run: settings that are valid and cannot work, with the numbers that say so."""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress

from flows.pipeline.config import RunConfig
from flows.pipeline.step import Step
from flows.planning.sizes import UnknownSizeError
from flows.planning.work import CostCounter

# Below it an iteration's training is hardly more than its warm-up.
_FEW_STEPS = 10
# AdamW moves a weight by about the learning rate in a step; the paper's runs move by 8e-5.
_SMALL_MOVE = 1e-5
# With fewer prompts a win rate of 60 % does not differ significantly from one of 50 %.
_FEW_PROMPTS = 64


def cautions(config: RunConfig, steps: Sequence[Step]) -> Iterator[str]:
    """Sentences, each with numbers and a remedy; none if nothing is known to be wrong."""
    counter = CostCounter(config, steps)
    yield from _unread(config)
    yield from _cut_off(config)
    with suppress(UnknownSizeError):
        yield from _training(config, math.floor(counter.train_prompts()))
    with suppress(UnknownSizeError):
        yield from _held_out(config, counter.test_prompts())


def _held_out(config: RunConfig, prompts: float) -> Iterator[str]:
    # None at all is an error of `prepare`.
    if 0 < prompts < _FEW_PROMPTS:
        where = "inputs" if config.inputs.test_prompts else "prepare"
        yield (
            f"{prompts:g} held-out prompts tell little: the win rate is known to "
            f"±{98 / math.sqrt(prompts):.0f} points. Raise {where}.test_prompts to {_FEW_PROMPTS} "
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


def _cut_off(config: RunConfig) -> Iterator[str]:
    read = config.train.max_length_tokens
    sampled = config.generate.max_new_tokens
    if sampled > read and not config.inputs.preferences:
        yield (
            f"train reads {read} tokens of a prompt with its response, and generate samples up to "
            f"{sampled}: the end of a longer response is not trained. Raise train.max_length_tokens"
        )


def _training(config: RunConfig, prompts: int) -> Iterator[str]:
    train = config.train
    pairs = prompts * config.pair.pairs_per_prompt
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
