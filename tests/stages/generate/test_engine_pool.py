"""Several engines of one stage: the same responses as one, whatever becomes of an engine."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import weakref

import psutil
import pytest

from stages.contract.errors import StoppedError, UserError
from stages.contract.events import Log
from stages.contract.program import execute
from stages.contract.request import Resources
from stages.generate.backend import Prompt, Sampling
from stages.generate.engine_process import Units
from stages.generate.params import GenerateParams
from stages.generate.run import STAGE
from stages.generate.units import split_units
from stages.modeling.devices import device_environments
from stages.modeling.engines import EngineError
from tests.stage_calls import EventLog, call_request, request_for, write_prompts
from tests.stages.generate.small_runs import TEXTS
from tests.tiny_models import make_tiny_llama

PARAMS = GenerateParams(
    num_samples=3,
    max_new_tokens=12,
    dtype="float32",
    transformers={"batch_size": 4},
    chunk_prompts=8,
)


@pytest.fixture
def request_of(policy, tmp_path):
    """Makes a request with a number of engines, in a store of its own."""

    def make(engines, name):
        inputs = {"policy": policy, "prompts": write_prompts(tmp_path / "prompts.parquet", TEXTS)}
        return request_for(PARAMS, inputs, tmp_path / name, resources=Resources(processes=engines))

    return make


class KillingLog(EventLog):
    """An emitter that kills engines when the first chunk is written."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number
        self.killed: list[int] = []

    def info(self, message: str) -> None:
        super().info(message)
        if message.startswith("wrote") and not self.killed:
            for engine in multiprocessing.active_children()[: self._number]:
                assert engine.pid is not None
                os.kill(engine.pid, signal.SIGKILL)
                engine.join()
                self.killed.append(engine.pid)


def prompts_of(lengths: list[int], *, chunk: int = 0) -> list[Prompt]:
    return [Prompt([], [1] * each, [10 * each, 10 * each + 1], chunk) for each in lengths]


@pytest.mark.slow
def test_two_engines_give_the_bytes_of_one(request_of):
    one, _ = call_request(STAGE, request_of(1, "one"))
    request = request_of(2, "two")
    assert request.key == request_of(1, "one").key
    two, _ = call_request(STAGE, request)
    assert two.manifest.digest() == one.manifest.digest()
    assert two.manifest.notes["engines"] == 2
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_the_prompts_of_a_killed_engine_go_to_the_other(request_of):
    one, _ = call_request(STAGE, request_of(1, "one"))
    log = KillingLog(1)
    artifact = execute(STAGE, request_of(2, "two"), log)
    assert len(log.killed) == 1
    assert artifact.manifest.digest() == one.manifest.digest()
    warnings = [each for each in log.events if isinstance(each, Log) and each.level == "warning"]
    assert "1 go on with its prompts" in warnings[0].message


@pytest.mark.slow
def test_a_retry_goes_on_where_the_last_engine_was_killed(request_of):
    one, _ = call_request(STAGE, request_of(1, "one"))
    request = request_of(2, "two")
    with pytest.raises(EngineError, match="ended without a word"):
        execute(STAGE, request, KillingLog(2))
    artifact, _ = call_request(STAGE, request)
    assert json.loads((artifact.path / "timings.json").read_text())["chunks_reused"] >= 1
    assert artifact.manifest.digest() == one.manifest.digest()


@pytest.mark.slow
def test_a_stage_that_is_stopped_leaves_no_engine(request_of):
    class Stopping(EventLog):
        def info(self, message: str) -> None:
            self.engines = [each.pid for each in multiprocessing.active_children()]
            raise StoppedError(message)

    log = Stopping()
    with pytest.raises(StoppedError):
        execute(STAGE, request_of(2, "two"), log)
    assert len(log.engines) == 2
    assert not any(psutil.pid_exists(each) for each in log.engines)


@pytest.mark.slow
def test_an_engine_s_refusal_keeps_its_remedy(request_of, policy, tmp_path):
    bare = make_tiny_llama(tmp_path / "bare")
    (bare / "model.safetensors").unlink()
    inputs = {"policy": bare, "prompts": write_prompts(tmp_path / "prompts.parquet", TEXTS)}
    request = request_for(PARAMS, inputs, tmp_path / "store", resources=Resources(processes=2))
    with pytest.raises(UserError, match="no weights in safetensors format") as caught:
        call_request(STAGE, request)
    assert caught.value.remedy
    assert not multiprocessing.active_children()


def test_a_unit_of_transformers_is_a_batch_of_its_chunk():
    prompts = prompts_of([2, 5, 5]) + prompts_of([9], chunk=3)
    units = list(split_units(iter(prompts), PARAMS))
    assert [unit.numbers for unit in units] == [(1, 2), (0,), (3,)]
    assert [unit.places for unit in units] == [
        [(1, 0), (1, 1), (2, 0), (2, 1)],
        [(0, 0), (0, 1)],
        [(3, 0), (3, 1)],
    ]
    cut = list(split_units(iter(prompts), GenerateParams(transformers={"batch_size": 3})))
    assert cut[1].places == [(2, 1), (0, 0), (0, 1)]
    assert cut[1].prompts[0].seeds == [51]


class Sent:
    """The engine's end of a pipe through which units come."""

    def __init__(self, units):
        self._units = list(units)

    def send(self, message):
        """Nobody reads it."""

    def recv(self):
        return self._units.pop(0) if self._units else None


def test_an_engine_forgets_the_prompts_that_it_has_answered():
    """A stream is as long as the shard."""
    prompts = (Prompt([], [1, 2], [number, number + 1]) for number in range(40))
    params = GenerateParams(backend="vllm")
    given = Units(Sent([Sampling(params, frozenset()), *split_units(prompts, params)]))
    places, seen = [], []
    unit, _ = given.await_first()
    for index, prompt in enumerate(given.prompts(unit)):
        places += [given.place(index, seed) for seed in (1, 0)]
        seen.append(weakref.ref(prompt))
    del prompt
    assert places == [(number, sample) for number in range(40) for sample in (1, 0)]
    alive = sum(each() is not None for each in seen)
    assert alive <= 4, "those of one unit"


def test_every_response_is_in_one_unit_of_a_stream():
    prompts = prompts_of(list(range(1, 12)))
    units = list(split_units(iter(prompts), GenerateParams(backend="vllm")))
    assert len(units) > 2
    assert [place for unit in units for place in unit.places] == [
        (number, sample) for number in range(11) for sample in range(2)
    ]


@pytest.mark.parametrize(
    ("resources", "tensor_parallel", "expected"),
    [
        (Resources(gpus=4), 2, ["4,5", "6,7"]),
        (Resources(gpus=4), 1, ["4", "5", "6", "7"]),
        (Resources(gpus=4), 4, ["4,5,6,7"]),
    ],
)
def test_engines_share_the_gpus_of_the_stage(monkeypatch, resources, tensor_parallel, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    params = GenerateParams(backend="vllm", vllm={"tensor_parallel_size": tensor_parallel})
    environments = device_environments(resources, params.devices_per_engine)
    assert [each["CUDA_VISIBLE_DEVICES"] for each in environments] == expected
    assert params.num_engines(resources) == len(expected)


def test_a_server_has_no_engines():
    params = GenerateParams(backend="openai", openai={"url": "http://h/v1", "model": "m"})
    assert params.num_engines(Resources(processes=4)) == 0
