"""Training that keeps its adapters as adapters, and goes on with them over the same base."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from stages.contract.errors import UserError
from stages.tables.schemas import read_rows
from stages.train.reference import REFERENCE_LOGPROBS
from tests.stage_calls import file_input
from tests.stages.train.checkpoints import assert_same_logprobs
from tests.stages.train.train_helpers import train

LORA = {"rank": 4, "alpha": 8.0}
KEPT = {"lora": LORA | {"save": "adapter"}}


@pytest.fixture(scope="module")
def kept(tmp_path_factory, policy, pairs):
    return train(tmp_path_factory.mktemp("kept"), policy, [pairs], **KEPT)


@pytest.fixture(scope="module")
def merged(tmp_path_factory, policy, pairs):
    """Two trainings with merged adapters, the second from the first."""
    store = tmp_path_factory.mktemp("merged")
    first = train(store, policy, [pairs], lora=LORA)
    return first, train(store, first.checkpoint, [pairs], lora=LORA)


def reference_of(trained):
    rows = read_rows(trained.artifact.path / "reference_logprobs.parquet", REFERENCE_LOGPROBS)
    return [
        logprob for row in rows for logprob in row["chosen_logprobs"] + row["rejected_logprobs"]
    ]


def test_the_checkpoint_is_an_adapter_that_names_its_base(kept, merged, policy):
    assert kept.losses == merged[0].losses
    checkpoint = kept.checkpoint
    assert_same_logprobs(checkpoint, policy, merged[0].checkpoint)
    assert json.loads((checkpoint / "base.json").read_text()) == {
        "digest": file_input(policy).digest
    }
    assert not (checkpoint / "config.json").exists()
    tokenizer, start = map(AutoTokenizer.from_pretrained, (checkpoint, policy))
    assert tokenizer.get_vocab() == start.get_vocab()
    assert tokenizer.chat_template == start.chat_template


@pytest.mark.parametrize(
    "processes", [pytest.param(1, id="one"), pytest.param(2, marks=pytest.mark.slow, id="ZeRO-3")]
)
def test_training_goes_on_with_the_same_policy(
    tmp_path, kept, merged, policy, pairs, processes, forked_workers
):
    checkpoint = kept.checkpoint
    sharded = {"processes": 2, "deepspeed": {"zero_stage": 3}} if processes == 2 else {}
    again = train(tmp_path / "store", policy, [pairs], adapter=checkpoint, **KEPT, **sharded)
    assert reference_of(again) == pytest.approx(reference_of(merged[1]), abs=1e-4)
    assert again.records[0]["chosen_logratio"] == pytest.approx(0.0, abs=1e-6)
    assert again.losses[0] == pytest.approx(merged[1].losses[0], abs=1e-4)
    assert again.losses[-1] < again.losses[0]
    after = load_file(again.checkpoint / "adapter_model.safetensors")
    before = load_file(checkpoint / "adapter_model.safetensors")
    assert after.keys() == before.keys()
    assert any(not torch.equal(after[name], before[name]) for name in after)


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ({"rank": 2, "alpha": 8.0}, "rank 4 and alpha 8.0"),
        ({"rank": 4, "alpha": 4.0}, "rank 4 and alpha 8.0"),
        ({"rank": 0}, "asks for 0"),
    ],
)
def test_an_adapter_of_other_settings_is_refused(tmp_path, kept, policy, pairs, lora, said):
    with pytest.raises(UserError, match=said):
        train(tmp_path, policy, [pairs], adapter=kept.checkpoint, lora=lora)


def test_an_adapter_goes_over_no_other_base(tmp_path, kept, other, pairs):
    with pytest.raises(UserError, match="digest"):
        train(tmp_path, other, [pairs], adapter=kept.checkpoint, **KEPT)


def test_an_adapter_that_is_not_finite_is_refused(tmp_path, kept, policy, pairs):
    damaged = shutil.copytree(kept.checkpoint, tmp_path / "adapter")
    weights = load_file(damaged / "adapter_model.safetensors")
    next(iter(weights.values())).fill_(float("nan"))
    save_file(weights, damaged / "adapter_model.safetensors")
    with pytest.raises(UserError, match="infinite or not a number"):
        train(tmp_path / "store", policy, [pairs], adapter=damaged, **KEPT)
