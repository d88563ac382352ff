"""Several processes, and DeepSpeed: the same loss curve as one process without either."""

import json
import sys

import psutil
import pytest
from transformers import Gemma3Config

from stages.contract.errors import StageFailedError, UserError
from tests.stages.train.train_helpers import (
    PYTHON,
    assert_same_training,
    at_step,
    make_pairs,
    request_for,
    run_until,
    train,
    workers_of,
)
from tests.tiny_models import (
    SIZES,
    make_head_beside_a_tied_config,
    make_tiny_llama,
    save_tiny_model,
)

pytestmark = pytest.mark.usefixtures("forked_workers")

# ZeRO's stage, and processes.
LAYOUTS = [("off", 2), (1, 1), (2, 2), (3, 2)]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    # 29 pairs: the last batch of an epoch has fewer than there are micro-batches to fill.
    return make_pairs(tmp_path_factory.mktemp("pairs") / "pairs.parquet", 29, ties=(3, 7))


@pytest.fixture(scope="module")
def plain(tmp_path_factory, policy, pairs):
    """One process without DeepSpeed, in padded rows: what all the others are compared with."""
    store = tmp_path_factory.mktemp("store")
    return train(store, policy, [pairs], **SETTINGS, row_layout="padded")


SETTINGS = {"micro_batch_tokens": 16, "target_ratio": 0.5}


@pytest.mark.parametrize(("layout", "processes"), LAYOUTS)
def test_the_loss_curve_equals_one_process(tmp_path, policy, pairs, plain, layout, processes):
    settings = SETTINGS | {"deepspeed": {"zero_stage": layout}}
    training = train(tmp_path / "store", policy, [pairs], processes=processes, **settings)
    curves = ["kappa", "num_pairs", "num_tokens", "bonus_gradient_share", "grad_norm"]
    assert_same_training(training, plain, 1e-3, curves=curves)
    assert training.artifact.manifest.key == plain.artifact.manifest.key


def test_shards_in_bfloat16_start_at_their_reference(tmp_path, policy, pairs):
    settings = {"design": "none", "nll_weight": 0.0, "epochs": 1, "precision": "bfloat16"}
    settings |= {"deepspeed": {"zero_stage": 1}}
    training = train(tmp_path / "store", policy, [pairs], **settings)
    assert training.records[0]["chosen_logratio"] == 0.0
    assert training.records[0]["rejected_logratio"] == 0.0


@pytest.mark.slow
def test_one_weight_for_embeddings_and_head_is_sharded_as_one(tmp_path, pairs):
    policy = make_tiny_llama(tmp_path / "policy", tie_word_embeddings=True)
    settings = SETTINGS | {"epochs": 1}
    plain = train(tmp_path / "plain", policy, [pairs], **settings)
    sharded = settings | {"processes": 2, "deepspeed": {"zero_stage": 3}}
    training = train(tmp_path / "store", policy, [pairs], **sharded)
    assert_same_training(training, plain)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"lora": {"rank": 4}},
        pytest.param({"deepspeed": {"zero_stage": 3}}, marks=pytest.mark.slow),
        pytest.param({"lora": {"rank": 4}, "deepspeed": {"zero_stage": 3}}, marks=pytest.mark.slow),
    ],
    ids=lambda settings: "-".join(map(str, settings)) or "plain",
)
def test_head_beside_a_tied_config_is_trained_and_saved(tmp_path, pairs, settings):
    settings = SETTINGS | {"epochs": 1} | settings
    untied = make_tiny_llama(tmp_path / "untied")
    plain = train(tmp_path / "plain", untied, [pairs], **settings)
    odd = make_head_beside_a_tied_config(tmp_path / "odd")
    training = train(tmp_path / "store", odd, [pairs], **settings)
    assert_same_training(training, plain)
    config = json.loads((training.checkpoint / "config.json").read_text())
    assert config["tie_word_embeddings"] is False


@pytest.mark.slow
def test_zero_3_merges_adapters(tmp_path, pairs):
    # Wide enough for adapters in shards: DeepSpeed leaves weights of up to 100,000 numbers whole.
    policy = make_tiny_llama(tmp_path / "wide", intermediate_size=26_000, num_hidden_layers=1)
    settings = SETTINGS | {"epochs": 1, "lora": {"rank": 4, "alpha": 8.0}}
    plain = train(tmp_path / "plain", policy, [pairs], **settings)
    sharded = settings | {"processes": 2, "deepspeed": {"zero_stage": 3}}
    training = train(tmp_path / "store", policy, [pairs], **sharded)
    assert_same_training(training, plain)


def test_several_processes_leave_a_vision_tower_as_it_is(tmp_path, pairs):
    sizes = {**SIZES, "head_dim": 8}
    vision = {"num_hidden_layers": 1, "hidden_size": 16, "image_size": 28, "patch_size": 14}
    vision |= {"intermediate_size": 16, "num_attention_heads": 2}
    config = Gemma3Config(text_config=sizes, vision_config=vision, mm_tokens_per_image=4)
    policy = save_tiny_model(config, tmp_path / "policy")
    settings = {"epochs": 1, "micro_batch_tokens": 16}
    plain = train(tmp_path / "plain", policy, [pairs], **settings)
    training = train(tmp_path / "store", policy, [pairs], processes=2, **settings)
    assert_same_training(training, plain)
    [kept] = [
        event["message"]
        for event in training.events
        if "no text reaches" in event.get("message", "")
    ]
    assert kept.startswith("34 weights")


def test_workers_end_with_the_stage(tmp_path, policy, pairs):
    request = request_for(tmp_path / "store", policy, [pairs], processes=2, epochs=10_000)
    workers = []

    def kill(process):
        workers.extend(workers_of(process.pid))
        process.kill()

    run_until(request, tmp_path, at_step(1), kill)
    gone, alive = psutil.wait_procs(workers, timeout=60)
    assert len(gone) == 2
    assert not alive


@pytest.mark.slow
def test_sigterm_saves_in_all_processes(tmp_path, policy, pairs):
    settings = SETTINGS | {"processes": 2, "epochs": 12}
    whole = train(tmp_path / "whole", policy, [pairs], **settings)
    request = request_for(tmp_path / "store", policy, [pairs], **settings)
    code, lines = run_until(request, tmp_path, at_step(3), lambda process: process.terminate())
    assert code == 143
    assert json.loads(lines[-1])["kind"] == "stopped"
    resumed = train(tmp_path / "store", policy, [pairs], **settings)
    assert resumed.steps[0] > 3
    assert resumed.weights == whole.weights


@pytest.mark.slow
def test_workers_execute_no_package_where_the_user_stands(tmp_path, policy, pairs, monkeypatch):
    monkeypatch.setattr(sys, "executable", PYTHON)
    package = tmp_path / "mine" / "stages"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('executed')\n")
    monkeypatch.chdir(tmp_path / "mine")
    train(tmp_path / "store", policy, [pairs], processes=2, epochs=1)


def test_a_worker_s_complaint_is_the_stage_s(tmp_path, policy, pairs):
    with pytest.raises(UserError, match="training diverged") as caught:
        train(tmp_path / "store", policy, [pairs], processes=2, learning_rate=1e30)
    assert caught.value.remedy


@pytest.mark.timeout(120)
def test_the_lock_of_a_killed_build_holds_up_no_training(tmp_path, policy, pairs, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir()
    lock.touch()
    train(tmp_path / "store", policy, [pairs], epochs=1, deepspeed={"zero_stage": 1})


def test_a_crash_in_a_worker_is_named(tmp_path, policy, pairs, monkeypatch):
    # A rendezvous that no worker can reach.
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nonexistent0")
    with pytest.raises(StageFailedError, match=r"training process \d of 2 failed"):
        train(tmp_path / "store", policy, [pairs], processes=2)
