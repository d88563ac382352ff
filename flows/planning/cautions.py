"""Cautions before a run: settings that are valid and cannot work, with the numbers that say so."""

from __future__ import annotations

import math
from collections.abc import Iterator

from flows.pipeline.config import RunConfig
from flows.pipeline.external import External, resolve
from flows.planning import sizes

# Below it an iteration's training is hardly more than its warm-up.
_FEW_STEPS = 10
# AdamW moves a weight by about the learning rate in a step; the paper's runs move by 8e-5.
_SMALL_MOVE = 1e-5
# With fewer prompts a win rate of 60 % cannot be told from one of 50 %.
_FEW_PROMPTS = 64
_STEPS_WANTED = 20
# Responses of so many tokens are hardly ever likelier than e⁻¹⁰⁰, where the bonus has no gradient.
_LONG_RESPONSE = 256


def cautions(config: RunConfig) -> list[str]:
    """Sentences, each with numbers and a remedy; none where nothing is known to be wrong."""
    data = sizes.rows_of([resolve(each, "dataset") for each in config.inputs.prompts])
    return [*_bonus(config), *_training(config, data), *_evaluation(config)]


def _bonus(config: RunConfig) -> Iterator[str]:
    train, longest = config.train, config.generate.max_new_tokens
    # The published forms do so on purpose.
    if train.design != "one_minus_pi" or train.numerics == "paper":
        return
    if train.probability == "sequence" and longest >= _LONG_RESPONSE:
        yield (
            f"train.probability is 'sequence', and responses have up to {longest} tokens: the "
            "bonus of a long response has no gradient. Set train.probability to token_mean or token"
        )


def _training(config: RunConfig, data: sizes.Rows | None) -> Iterator[str]:
    prompts = sizes.train_prompts(config, data)
    if prompts is None:
        return
    pairs, train = math.floor(prompts) * config.pair.pairs_per_prompt, config.train
    if config.pair_data == "accumulate":
        pairs *= config.iterations
    pairs = math.floor(pairs * (1.0 - train.validation_share))
    if pairs < 1:
        return
    steps = math.ceil(pairs / train.global_batch_pairs) * train.epochs
    if steps < _FEW_STEPS:
        batch = math.floor(pairs * train.epochs / _STEPS_WANTED)
        remedy = "Bring more prompts"
        if batch > 1:
            remedy = f"Set train.global_batch_pairs to {batch} or less, or bring more prompts"
        yield (
            f"train takes {steps} step{'s' if steps > 1 else ''} in an iteration: at most {pairs} "
            f"pairs in batches of {train.global_batch_pairs}, {train.epochs} epochs. {remedy}"
        )
    move = steps * config.iterations * train.learning_rate
    if move < _SMALL_MOVE:
        yield (
            f"train hardly moves the policy: train.learning_rate is {train.learning_rate:g}, and "
            f"{steps * config.iterations} steps in all change a weight by {move:.0e} or so. "
            "Raise it, or take more steps"
        )


def _evaluation(config: RunConfig) -> Iterator[str]:
    own: list[External] = []
    if config.inputs.test_prompts is not None:
        own.append(resolve(config.inputs.test_prompts, "dataset"))
    held_out = sizes.held_out_prompts(config, sizes.rows_of(own))
    # None at all is an error of `prepare`.
    if 0 < held_out < _FEW_PROMPTS:
        where = "inputs.test_prompts" if own else "prepare.test_prompts"
        yield (
            f"{held_out:g} held-out prompts tell little: the win rate is known to "
            f"±{98 / math.sqrt(held_out):.0f} points. Raise {where} to {_FEW_PROMPTS} or more"
        )
    if config.promote.better_than_base_confidence is None and config.promote.min_win_rate is None:
        yield (
            "promotion asks for no win over the base: set promote.better_than_base_confidence or "
            "promote.min_win_rate"
        )
