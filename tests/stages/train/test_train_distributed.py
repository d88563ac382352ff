"""Several processes, and DeepSpeed: the same loss curve as one process without either."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from stages.contract.errors import StageFailedError, UserError
from stages.contract.events import Metric, parse_event
from tests.stages.train.train_helpers import make_pairs, request_for, train
from tests.tiny_models import make_tiny_llama

pytestmark = pytest.mark.slow

LAYOUTS = [("off", 2)] + [(stage, processes) for stage in (0, 2, 3) for processes in (1, 2)]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    # 29 pairs: the last batch of an epoch has fewer than there are micro-batches to fill.
    return make_pairs(tmp_path_factory.mktemp("pairs") / "pairs.parquet", 29, ties=(3, 7))


@pytest.fixture(scope="module")
def plain(tmp_path_factory, policy, pairs):
    return train(tmp_path_factory.mktemp("store"), policy, [pairs], **SETTINGS)


SETTINGS = {"micro_batch_pairs": 1, "target_ratio": 0.5, "calibration_batches": 2}


@pytest.mark.parametrize(("zero_stage", "processes"), LAYOUTS)
def test_the_loss_curve_is_that_of_one_process(
    tmp_path, policy, pairs, plain, zero_stage, processes
):
    found = train(
        tmp_path / "store",
        policy,
        [pairs],
        processes=processes,
        deepspeed={"zero_stage": zero_stage},
        **SETTINGS,
    )
    assert found.losses == pytest.approx(plain.losses, rel=1e-3, abs=1e-3)
    names = ["kappa", "num_pairs", "num_tokens", "bonus_gradient_share"]
    # DeepSpeed tells no gradient norm in float32 at stage 0.
    for name in names if zero_stage == 0 else [*names, "grad_norm"]:
        curve = [record[name] for record in found.records]
        assert curve == pytest.approx([record[name] for record in plain.records], rel=1e-2), name
    expected = load_file(plain.artifact.path / "checkpoint" / "model.safetensors")
    weights = load_file(found.artifact.path / "checkpoint" / "model.safetensors")
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-3, atol=1e-3, msg=name)
    assert found.artifact.manifest.key == plain.artifact.manifest.key


def test_zero_3_saves_merged_adapters_and_an_average_reference(tmp_path, policy, pairs):
    settings = SETTINGS | {"lora": {"rank": 4, "alpha": 8.0}, "reference_kind": "ema"}
    plain = train(tmp_path / "plain", policy, [pairs], **settings)
    found = train(tmp_path / "store", policy, [pairs], deepspeed={"zero_stage": 3}, **settings)
    for folder in ("checkpoint", "ema"):
        expected = load_file(plain.artifact.path / folder / "model.safetensors")
        weights = load_file(found.artifact.path / folder / "model.safetensors")
        assert weights.keys() == expected.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-3, atol=1e-3, msg=name)


def run_and_signal(request, folder: Path, number: int, *, step: int, worker: bool) -> list[str]:
    """Runs the stage as a program and signals it, or one of its workers, at a step."""
    path = folder / "request.json"
    request.write(path)
    with subprocess.Popen(
        [sys.executable, "-m", "stages.train", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(Path.cwd())},
        text=True,
    ) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            event = parse_event(line)
            if isinstance(event, Metric) and event.step >= step:
                target = _children(process.pid)[-1] if worker else process.pid
                os.kill(target, number)
                break
        lines += process.stdout.read().splitlines()
        process.wait()
        return lines


def _children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("zero_stage", ["off", 2, 3])
def test_a_killed_worker_ends_the_others_and_a_retry_goes_on(tmp_path, policy, pairs, zero_stage):
    settings = SETTINGS | {"deepspeed": {"zero_stage": zero_stage}, "processes": 2, "epochs": 12}
    whole = train(tmp_path / "whole", policy, [pairs], **settings)
    request = request_for(tmp_path / "store", policy, [pairs], **settings, checkpoint_every_steps=2)
    lines = run_and_signal(request, tmp_path, signal.SIGKILL, step=5, worker=True)
    failure = json.loads(lines[-1])
    assert failure["type"] == "failure"
    assert "killed by SIGKILL" in failure["message"]

    resumed = train(tmp_path / "store", policy, [pairs], **settings, checkpoint_every_steps=2)
    steps = [event["step"] for event in resumed.events if event["type"] == "metric"]
    assert steps[0] > 1
    assert resumed.weights == whole.weights


def test_workers_end_with_the_stage(tmp_path, policy, pairs):
    request = request_for(tmp_path / "store", policy, [pairs], processes=2, epochs=10_000)
    path = tmp_path / "request.json"
    request.write(path)
    with subprocess.Popen(
        [sys.executable, "-m", "stages.train", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(Path.cwd())},
        text=True,
    ) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if isinstance(parse_event(line), Metric))
        workers = [psutil.Process(pid) for pid in _children(process.pid)]
        process.kill()
        gone, alive = psutil.wait_procs(workers, timeout=60)
    assert len(gone) == 2
    assert not alive


def test_sigterm_saves_in_all_processes(tmp_path, policy, pairs):
    settings = SETTINGS | {"processes": 2, "epochs": 12}
    whole = train(tmp_path / "whole", policy, [pairs], **settings)
    request = request_for(tmp_path / "store", policy, [pairs], **settings)
    lines = run_and_signal(request, tmp_path, signal.SIGTERM, step=3, worker=False)
    assert json.loads(lines[-1])["kind"] == "stopped"
    resumed = train(tmp_path / "store", policy, [pairs], **settings)
    steps = [event["step"] for event in resumed.events if event["type"] == "metric"]
    assert steps[0] > 3
    assert resumed.weights == whole.weights


def test_a_worker_s_complaint_is_the_stage_s(tmp_path, policy, pairs):
    with pytest.raises(UserError, match="not defined under forward_kl") as caught:
        train(
            tmp_path / "store",
            policy,
            [pairs],
            processes=2,
            design="selm",
            divergence="forward_kl",
        )
    assert caught.value.remedy


def test_a_crash_in_a_worker_is_named(tmp_path, policy, pairs, monkeypatch):
    # A rendezvous that no worker can reach.
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nonexistent0")
    with pytest.raises(StageFailedError, match=r"training process \d of 2 failed"):
        train(tmp_path / "store", policy, [pairs], processes=2)
