"""Validation pairs: which they are, that nothing is learnt of them, and how they are measured."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from transformers import AutoModelForCausalLM

from stages.contract.errors import UserError
from stages.contract.tables import PAIRS, read_rows, write_table
from stages.train.data import load_pairs
from stages.train.objective import split_by_prompt
from stages.train.params import TrainParams
from tests.stages.train.train_helpers import PARAMS, Trained, train

SHARE = 0.3


@dataclass(frozen=True)
class Named:
    """Row of a pair, as the split sees it."""

    prompt_id: str


def named(*numbers: int) -> list[Named]:
    return [Named(f"prompt {number}") for number in numbers]


@pytest.fixture(scope="module")
def validated(tmp_path_factory, policy, pairs) -> Trained:
    store = tmp_path_factory.mktemp("store")
    return train(store, policy, [pairs], validation_share=SHARE, validation_every_steps=2)


@pytest.fixture(scope="module")
def held(pairs) -> set[str]:
    """Prompts of the pairs that are not trained on."""
    loaded, _ = load_pairs([pairs], TrainParams.model_validate(PARAMS))
    return {pair.prompt_id for pair in split_by_prompt(loaded, SHARE)[1]}


def test_all_pairs_of_a_prompt_are_on_one_side_whatever_else_there_is():
    many = named(*range(1000), *range(1000))
    trained, held = split_by_prompt(many, 0.25)
    assert not {pair.prompt_id for pair in trained} & {pair.prompt_id for pair in held}
    assert len(trained) + len(held) == 2000
    assert 0.2 < len(held) / 2000 < 0.3
    fewer, fewer_held = split_by_prompt(many[:500], 0.25)
    assert set(fewer) <= set(trained)
    assert set(fewer_held) <= set(held)


def test_a_small_share_takes_at_least_one_prompt_and_none_takes_all():
    assert len(split_by_prompt(named(1, 2, 3), 1e-9)[1]) == 1
    assert split_by_prompt(named(1, 2, 3), 0.0) == (named(1, 2, 3), [])
    with pytest.raises(UserError, match=r"validation_share = 0\.5 takes all of 1 prompts"):
        split_by_prompt(named(1, 1), 0.5)


def test_the_policy_is_that_of_a_training_without_the_pairs(
    tmp_path, validated, policy, pairs, held
):
    rest = tmp_path / "rest.parquet"
    rows = [row for row in read_rows(pairs, PAIRS) if row["prompt_id"] not in held]
    assert 0 < len(rows) < 32
    write_table(rest, PAIRS, rows)
    alone = train(tmp_path / "store", policy, [rest])
    assert alone.weights == validated.weights
    assert alone.losses == validated.losses
    assert alone.summary["metrics"] == validated.summary["metrics"]
    assert "validation" not in alone.summary


def test_loss_accuracy_and_margin_are_those_of_the_saved_policy(validated, policy, pairs, held):
    rows = [row for row in read_rows(pairs, PAIRS) if row["prompt_id"] in held]
    rewards = {}
    for name, path in (("new", validated.artifact.path / "checkpoint"), ("old", policy)):
        model = AutoModelForCausalLM.from_pretrained(path)
        rewards[name] = torch.tensor(
            [[_logprob(model, row, side) for side in ("chosen", "rejected")] for row in rows]
        )
    # β is 1.
    margins = (rewards["new"] - rewards["old"]) @ torch.tensor([1.0, -1.0])
    tied = torch.tensor([row["tie"] for row in rows])
    losses = torch.where(tied, 0.0, torch.nn.functional.softplus(-margins))
    expected = {
        "preference_loss": losses.mean().item(),
        "accuracy": (margins[~tied] > 0).double().mean().item(),
        "margin": margins.mean().item(),
    }
    found = validated.summary["validation"]
    assert found.pop("pairs") == len(rows)
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-4)


def _logprob(model, row, side) -> float:
    prompt, response = row["prompt_token_ids"], row[f"{side}_token_ids"]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + response])).logits[0]
    logp = logits.log_softmax(dim=-1)[len(prompt) - 1 : -1]
    return float(logp.gather(1, torch.tensor(response)[:, None]).sum())


def test_they_are_measured_at_the_steps_asked_for_and_at_the_end(
    tmp_path, validated, policy, pairs
):
    def measured(found: Trained) -> list[int]:
        return [each["step"] for each in found.records if "validation_accuracy" in each]

    assert len(validated.records) == 6
    assert measured(validated) == [2, 4, 6]
    each_epoch = train(tmp_path / "epochs", policy, [pairs], validation_share=SHARE)
    assert measured(each_epoch) == [3, 6]
    rarely = train(
        tmp_path / "rarely", policy, [pairs], validation_share=SHARE, validation_every_steps=4
    )
    assert measured(rarely) == [4, 6]
    # How often is not in the key, so nothing of the artifact may depend on it.
    assert rarely.artifact.manifest.key == validated.artifact.manifest.key
    assert rarely.artifact.manifest.digest("") == validated.artifact.manifest.digest("")
