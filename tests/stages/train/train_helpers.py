"""Pairs, requests and runs of the train stage for its tests."""

import json
import math
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from stages.contract.digests import digest_of, prompt_id
from stages.contract.events import Metric, parse_event
from stages.contract.request import Resources, make_request
from stages.harness.program import execute
from stages.store.base import Artifact, Store
from stages.tables.schemas import PAIRS, read_rows, write_table
from stages.train.params import TrainParams
from stages.train.run import STAGE
from tests.stage_calls import EventLog, file_input
from tests.tiny_models import response_logprobs

VOCABULARY = 19
# Programs that are killed are real ones, also where workers are forks.
PYTHON = sys.executable

PARAMS = {
    "design": "one_minus_pi",
    "beta": 1.0,
    "nll_weight": 0.5,
    "learning_rate": 3e-3,
    "global_batch_pairs": 8,
    "epochs": 2,
    "gradient_checkpointing": False,
    "micro_batch_tokens": 64,
}


def make_pairs(path, num_pairs=32, *, ties=(), seed=0, longer_by=0, logprob=math.nan):
    """Random pairs of odd lengths; chosen responses open with token 7, rejected ones with 8.

    The sampler's log-probabilities are all ``logprob``, unknown by default.
    """
    random = np.random.default_rng(seed)

    def row(index):
        messages = [{"role": "user", "content": f"question {index}"}]
        fields = {
            "prompt_id": prompt_id(messages),
            "prompt": messages,
            "prompt_token_ids": random.integers(3, VOCABULARY, random.integers(1, 9)).tolist(),
            "tie": index in ties,
        }
        for side, opening, score in (("chosen", 7, 1.0), ("rejected", 8, 0.0)):
            length = int(random.integers(0, 6)) + longer_by
            ids = [opening, *random.integers(3, VOCABULARY, length).tolist()]
            fields |= {
                f"{side}_sample_index": int(side == "rejected"),
                f"{side}_token_ids": ids,
                f"{side}_logprobs": [logprob] * len(ids),
                side: [{"role": "assistant", "content": ""}],
                f"{side}_finish_reason": "stop",
                f"{side}_score": score if index not in ties else 0.5,
            }
        return fields

    write_table(path, PAIRS, (row(index) for index in range(num_pairs)))
    return path


def with_sampler(path, pairs, policy, *, apart=0.0):
    """The pairs with log-probabilities of a policy, by transformers, ``apart`` nats too low."""
    model = AutoModelForCausalLM.from_pretrained(policy).eval()
    rows = list(read_rows([pairs], PAIRS))
    for row in rows:
        prompt = row["prompt_token_ids"]
        for side in ("chosen", "rejected"):
            logprobs = response_logprobs(model, prompt, row[f"{side}_token_ids"])
            row[f"{side}_logprobs"] = (logprobs - apart).tolist()
    write_table(path, PAIRS, rows)
    return path


@dataclass(frozen=True)
class Trained:
    """An artifact of the train stage and what was said while it was made."""

    artifact: Artifact
    events: list[dict[str, Any]]

    @property
    def checkpoint(self):
        return self.artifact.path / "checkpoint"

    @property
    def tensors(self):
        """The weights, by name."""
        return load_file(self.checkpoint / "model.safetensors")

    @property
    def weights(self):
        """Digest of the weights' file: pytest takes long to compare bytes that differ."""
        return digest_of(self.checkpoint / "model.safetensors")

    @property
    def summary(self):
        return json.loads((self.artifact.path / "summary.json").read_text())

    @property
    def records(self):
        lines = (self.artifact.path / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    @property
    def losses(self):
        return [record["loss"] for record in self.records]

    @property
    def steps(self):
        """Steps that were done here, without those before an interruption."""
        return [event["step"] for event in self.events if event["type"] == "metric"]

    @property
    def warnings(self):
        return [event["message"] for event in self.events if event.get("level") == "warning"]


def assert_same_training(training, expected, tolerance=1e-4, *, curves=()):
    """Same curves, same names, and the same weights within float tolerance."""
    assert training.losses == pytest.approx(expected.losses, rel=tolerance, abs=tolerance)
    for name in curves:
        curve = [record[name] for record in training.records]
        assert curve == pytest.approx([record[name] for record in expected.records], rel=1e-2), name
    weights, others = training.tensors, expected.tensors
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, others[name], rtol=tolerance, atol=tolerance, msg=name)


def request_for(
    store,
    policy,
    pairs,
    *,
    reference=None,
    code=None,
    seed=0,
    processes=1,
    gpus=0,
    nodes=1,
    reference_kind="previous",
    **changes,
):
    """A request with :data:`PARAMS` and ``changes`` in its own store."""
    changes["reference"] = reference_kind
    if gpus == 0:
        # `auto` would follow the machine's processor, and tolerances are of float32.
        changes.setdefault("precision", "float32")
    Store.in_folder(str(store), create=True)
    return make_request(
        TrainParams.model_validate(PARAMS | changes),
        inputs={
            "policy": [file_input(policy)],
            "reference": [file_input(reference or policy)],
            "pairs": [file_input(path) for path in pairs],
            **({"code": [file_input(code)]} if code else {}),
        },
        seed=seed,
        store=str(store),
        resources=Resources(gpus=gpus, processes=processes, nodes=nodes),
    )


def train(store, policy, pairs, *, on_event=None, **options):
    """Runs the stage in this process.

    ``on_event`` is called with each event; :func:`request_for` takes the other options.
    """
    events = _Watched(on_event or (lambda event: None))
    artifact = execute(STAGE, request_for(store, policy, pairs, **options), events)
    return Trained(artifact, [json.loads(line) for line in events.stream.getvalue().splitlines()])


class _Watched(EventLog):
    def __init__(self, on_event):
        super().__init__()
        self._on_event = on_event

    def emit(self, event):
        super().emit(event)
        self._on_event(event)


def run_until(request, folder, due, act):
    """Runs the stage as a program, acts on it at the first event that is due, awaits its end.

    Returns exit code and lines.
    """
    path = folder / "request.json"
    request.write(path)
    with subprocess.Popen(
        [PYTHON, "-m", "stages.train", str(path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(Path.cwd())},
        text=True,
    ) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if due(parse_event(line)):
                act(process)
                break
        lines += process.stdout.read().splitlines()
        return process.wait(), lines


def at_step(step):
    """True where an event is the metric of ``step`` or a later one."""
    return lambda event: isinstance(event, Metric) and event.step >= step


def workers_of(pid):
    """The living worker processes that a stage's process started, by rank."""
    ranks = {}
    for child in psutil.Process(pid).children():
        # One that ends meanwhile, or that ended and awaits its parent, has neither of the two.
        with suppress(psutil.NoSuchProcess):  # includes zombies
            if any(part.endswith(".worker") for part in child.cmdline()):
                ranks[int(child.environ()["RANK"])] = child
    return [ranks[rank] for rank in sorted(ranks)]


def killer(step, victim=0):
    """Kills one of the workers of a training in this process when a step is reached, once.

    ``victim`` is the rank of the worker, modulo their number.
    """
    killed = []

    def kill(event):
        # A step has several metrics.
        if isinstance(event, Metric) and event.step == step and not killed:
            workers = workers_of(os.getpid())
            killed.append(workers[victim % len(workers)])
            killed[0].send_signal(signal.SIGKILL)

    return kill
