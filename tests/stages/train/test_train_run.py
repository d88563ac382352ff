"""The train stage in one process: what it learns, writes and refuses."""

import os
import signal
from statistics import fmean

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from stages.contract.errors import StoppedError, UserError
from stages.contract.events import Progress
from stages.modeling import save
from stages.tables.schemas import PAIRS, read_rows
from stages.train import reference
from stages.train.reference import REFERENCE_LOGPROBS
from tests.stages.train.train_helpers import (
    assert_same_training,
    make_pairs,
    train,
    with_sampler,
)
from tests.tiny_models import make_tiny_llama, response_logprobs


def first_logprob(checkpoint, pairs, token):
    """Mean log π(token | prompt) over the pairs' prompts."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    prompts = [row["prompt_token_ids"] for row in read_rows(pairs, PAIRS)]
    return fmean(response_logprobs(model, prompt, [token]).item() for prompt in prompts)


def test_chosen_openings_gain_and_rejected_ones_lose(trained, policy, pairs):
    checkpoint = trained.checkpoint
    assert first_logprob(checkpoint, pairs, 7) > first_logprob(policy, pairs, 7) + 0.5
    assert first_logprob(checkpoint, pairs, 8) < first_logprob(policy, pairs, 8) - 0.5
    assert trained.summary["metrics"]["accuracy"] > 0.9
    assert trained.records[-1]["preference_loss"] < trained.records[0]["preference_loss"]


def test_records_and_summary_say_what_was_done(trained):
    summary = trained.summary
    assert trained.records[0]["chosen_logratio"] == pytest.approx(0.0, abs=1e-5)
    assert summary["steps"] == 8
    assert summary["kappa"] == 1.0
    assert [record["step"] for record in trained.records] == list(range(1, 9))
    assert [record["epoch"] for record in trained.records] == [1] * 4 + [2] * 4
    for name in ("loss", "bonus", "bonus_ratio", "bonus_gradient_share", "accuracy", "grad_norm"):
        assert name in trained.records[0]
        assert name in summary["metrics"]
    last_epoch = [record["loss"] for record in trained.records[4:]]
    assert summary["metrics"]["loss"] == pytest.approx(sum(last_epoch) / 4)
    timings = {"step_seconds", "tokens_per_second", "peak_memory_mib"}
    assert not timings & summary["metrics"].keys()
    for record in trained.records:
        assert all(record[name] > 0 for name in timings)
        # Each prompt counts once, or with each of its responses.
        assert record["num_response_tokens"] < record["num_tokens_shared"] < record["num_tokens"]
    assert trained.artifact.manifest.files["metrics.jsonl"].telemetry
    shown = [event["values"] for event in trained.events if event["type"] == "metric"]
    assert [values["tokens_per_second"] for values in shown] == [
        record["tokens_per_second"] for record in trained.records
    ]
    assert "progress" in [event["type"] for event in trained.events]


def test_reference_logprobs_are_the_reference_model_s(tmp_path, policy, other, pairs):
    training = train(tmp_path / "store", policy, [pairs], reference=other)
    model = AutoModelForCausalLM.from_pretrained(other)
    stored = list(
        read_rows(training.artifact.path / "reference_logprobs.parquet", REFERENCE_LOGPROBS)
    )
    rows = list(read_rows(pairs, PAIRS))
    assert [row["pair_index"] for row in stored] == list(range(len(rows)))
    for row, ours in zip(rows, stored, strict=True):
        for side in ("chosen", "rejected"):
            expected = response_logprobs(model, row["prompt_token_ids"], row[f"{side}_token_ids"])
            logprobs = ours[f"{side}_logprobs"]
            assert logprobs == pytest.approx(expected.tolist(), rel=1e-4, abs=1e-5)
    assert abs(training.records[0]["chosen_logratio"]) > 0.1


def test_a_retry_computes_the_reference_s_missing_parts_alone(tmp_path, monkeypatch, policy, pairs):
    monkeypatch.setattr(reference, "PART_PAIRS", 8)
    monkeypatch.setattr("stages.contract.events.PROGRESS_INTERVAL_SECONDS", 0.0)
    whole = train(tmp_path / "whole", policy, [pairs])

    def stop(event):
        if isinstance(event, Progress) and (event.unit, event.done) == ("parts", 2):
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(StoppedError):
        train(tmp_path / "store", policy, [pairs], on_event=stop)
    resumed = train(tmp_path / "store", policy, [pairs])
    assert {event["total"] for event in resumed.events if event.get("unit") == "parts"} == {2}
    assert resumed.weights == whole.weights


def test_a_sampler_with_the_policy_s_numbers_is_trusted(tmp_path, policy, pairs, trained):
    sampled = with_sampler(tmp_path / "pairs.parquet", pairs, policy)
    training = train(tmp_path / "store", policy, [sampled])
    assert training.losses == pytest.approx(trained.losses, rel=1e-4, abs=1e-5)
    assert training.summary["reference_minus_sampler"]["mean"] < 1e-5
    assert training.summary["cautions"] == training.warnings == []


def test_a_sampler_that_differs_is_reported(tmp_path, policy, pairs):
    sampled = with_sampler(tmp_path / "pairs.parquet", pairs, policy, apart=0.3)
    training = train(tmp_path / "store", policy, [sampled], epochs=1)
    assert training.summary["reference_minus_sampler"]["mean"] == pytest.approx(0.3, abs=1e-5)
    assert training.summary["cautions"] == training.warnings
    assert "differ by 0.3 nats a token" in training.warnings[0]


def test_a_sampler_of_other_weights_is_refused(tmp_path, policy, other, pairs):
    sampled = with_sampler(tmp_path / "pairs.parquet", pairs, other)
    with pytest.raises(UserError, match=r"differ by \S+ nats a token.*other weights") as caught:
        train(tmp_path / "store", policy, [sampled])
    assert "generate.backend=transformers" in caught.value.remedy


def test_a_reference_that_did_not_sample_may_differ(tmp_path, policy, other, pairs):
    sampled = with_sampler(tmp_path / "pairs.parquet", pairs, policy)
    settings = {"reference": other, "reference_kind": "initial", "epochs": 1}
    training = train(tmp_path / "store", policy, [sampled], **settings)
    assert training.summary["reference_minus_sampler"]["mean"] > 1.0
    assert training.warnings == []


def test_the_same_seed_gives_the_same_bytes_and_another_one_does_not(
    tmp_path, trained, policy, pairs
):
    again = train(tmp_path / "again", policy, [pairs])
    assert again.weights == trained.weights
    assert again.artifact.manifest.digest("") == trained.artifact.manifest.digest("")
    assert train(tmp_path / "other", policy, [pairs], seed=1).weights != trained.weights


@pytest.mark.parametrize(
    "change",
    [*({"micro_batch_tokens": budget} for budget in (16, 1000)), {"gradient_checkpointing": True}],
    ids=str,
)
def test_settings_of_speed_do_not_change_the_result(tmp_path, trained, policy, pairs, change):
    training = train(tmp_path / "store", policy, [pairs], **change)
    assert training.artifact.manifest.key == trained.artifact.manifest.key
    assert_same_training(training, trained)


def test_kappa_and_its_ratio_weigh_the_bonus_alone(tmp_path, policy, pairs):
    none = train(tmp_path / "none", policy, [pairs], design="none")
    zero = train(tmp_path / "zero", policy, [pairs], kappa=0.0, design="arctanh")
    with_ratio = train(tmp_path / "ratio", policy, [pairs], design="none", target_ratio=0.25)
    bonus = train(tmp_path / "bonus", policy, [pairs], design="arctanh")
    assert zero.weights == none.weights == with_ratio.weights
    assert bonus.weights != none.weights
    assert zero.records[0]["bonus"] != 0.0


def test_a_target_ratio_sets_kappa(tmp_path, policy, pairs):
    settings = {"target_ratio": 0.25, "nll_weight": 0.0, "epochs": 3}
    training = train(tmp_path / "store", policy, [pairs], **settings)
    assert training.records[0]["bonus_ratio"] == pytest.approx(0.25, rel=1e-3)
    kappas = [record["kappa"] for record in training.records]
    assert len(set(kappas[:8])) == 8
    assert set(kappas[7:]) == {training.summary["kappa"]}


@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl"])
def test_a_published_bonus_that_underflows_is_trained_on(tmp_path, policy, divergence):
    pairs = make_pairs(tmp_path / "long.parquet", 8, longer_by=60)
    settings = {"design": "one_minus_pi", "divergence": divergence, "probability": "sequence"}
    long = {"target_ratio": 0.001, "global_batch_pairs": 1, "epochs": 1}
    training = train(tmp_path / "store", policy, [pairs], **settings, **long, numerics="paper")
    assert [record["bonus"] for record in training.records] == [0.0] * 8
    assert training.summary["kappa"] == 0.0
    [warning] = training.warnings
    assert warning.startswith("the bonus of all pairs is exactly 0")


def test_the_checkpoint_is_an_ordinary_one(trained, policy):
    checkpoint = trained.checkpoint
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(policy).chat_template
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert model.config.use_cache
    assert model.config.dtype == torch.float32
    assert (checkpoint / "generation_config.json").exists()
    assert str(policy) not in (checkpoint / "config.json").read_text()
    assert trained.tensors.keys() == load_file(policy / "model.safetensors").keys()


def test_tied_embeddings_stay_tied(tmp_path, pairs):
    tied = make_tiny_llama(tmp_path / "tied", tie_word_embeddings=True)
    training = train(tmp_path / "store", tied, [pairs])
    assert training.tensors.keys() == load_file(tied / "model.safetensors").keys()
    checkpoint = training.checkpoint
    assert first_logprob(checkpoint, pairs, 7) > first_logprob(tied, pairs, 7) + 0.5


def test_weights_beyond_the_largest_file_are_saved_in_several(tmp_path, policy, pairs, monkeypatch):
    whole = train(tmp_path / "whole", policy, [pairs], epochs=1)
    monkeypatch.setattr(save, "MAX_SHARD_SIZE", "20KB")
    training = train(tmp_path / "store", policy, [pairs], epochs=1)
    folder = training.checkpoint
    shards = list(folder.glob("*.safetensors"))
    assert len(shards) > 1
    weights = {name: weight for shard in shards for name, weight in load_file(shard).items()}
    expected = whole.tensors
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())
    AutoModelForCausalLM.from_pretrained(folder)
