"""Judges that a run serves itself: started once, shared, started again, and gone with the run."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from flows.execution.observer import Observer, observing
from flows.execution.plan import plan
from flows.execution.servers import Servers
from flows.execution.step_executor import StepExecutor, build_request
from flows.pipeline.config import RunConfig
from flows.pipeline.loading import load_config
from flows.pipeline.step import Step
from stages.contract.errors import StageFailedError, StoppedError, UserError
from stages.contract.events import Event, Log
from stages.contract.request import Request
from stages.store.base import Store
from stages.tables.schemas import RESPONSES, SCORES, read_rows, write_table
from tests.fake_vllm import served_judge
from tests.flows.loop import ROOT
from tests.flows.probes import wait_until
from tests.stage_calls import file_input, response
from tests.tiny_models import make_tiny_llama

QUICKSTART = ROOT / "configs/quickstart.yaml"


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    # It leads nowhere: the run's own server is asked past it.
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    return served_judge(tmp_path)


def score_step(
    config: RunConfig,
    folder: Path,
    shard: int = 0,
    rows: int = 4,
    responses: Iterable[dict[str, Any]] | None = None,
) -> Step:
    path = folder / f"responses-{shard}.parquet"
    texts = [response(f"Question {each} of {shard}?", 0, "An answer.") for each in range(rows)]
    write_table(path, RESPONSES, responses or texts)
    inputs = {
        "responses": [file_input(path)],
        "model": [file_input(Path(str(config.inputs.oracle_model)))],
    }
    return Step(f"base/score/{shard}", config.score, inputs)


@contextmanager
def run(config: RunConfig) -> Iterator[StepExecutor]:
    """A run's executor, which is stopped at the end of the block."""
    executor = StepExecutor(config)
    try:
        yield executor
    finally:
        executor.stop()


def scores(executor: StepExecutor, step: Step) -> list[float | None]:
    artifact = executor.execute(step, {}).artifact
    return [each["score"] for each in read_rows(artifact.file("scores.parquet"), SCORES)]


def logs(config: RunConfig) -> list[Path]:
    """Logs of the servers that were started."""
    return list(Path(config.store).glob("logs/serve/*/*.log"))


def server_processes(folder: Path) -> list[psutil.Process]:
    """The servers whose models or stores are in a folder, and their programs and supervisors."""
    found = []
    for each in psutil.process_iter(["cmdline"]):
        words = " ".join(each.info["cmdline"] or [])
        if ("stages.score.serve" in words or "api_server" in words) and str(folder) in words:
            found.append(each)
    return found


class Heard(Observer):
    """Keeps what stages report; ``progress`` is set once one has some answers."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.progress = threading.Event()

    def stage_event(self, request: Request, event: Event) -> None:
        if isinstance(event, Log):
            self.messages.append(event.message)
        elif getattr(event, "done", 0):
            self.progress.set()


def test_one_server_answers_all_steps_of_two_runs_and_the_second_keeps_it_then(
    tmp_path: Path, served: list[str]
) -> None:
    # Long enough for a second server to come, if one did.
    slow = [*served, "score.judge.engine_args.delay=1"]
    first = load_config(QUICKSTART, [*slow, "name=first"])
    second = load_config(QUICKSTART, [*slow, "name=second"])
    with run(second) as other:
        with run(first) as executor:
            for shard in range(2):
                assert scores(executor, score_step(first, tmp_path, shard)) == [7.0] * 4
            assert scores(other, score_step(second, tmp_path, 2)) == [7.0] * 4
            assert len(logs(first)) == 1
        # What the store has asks no server.
        with run(second) as executor:
            assert scores(executor, score_step(second, tmp_path, 1)) == [7.0] * 4
        assert len(logs(first)) == 1
        assert scores(other, score_step(second, tmp_path, 3)) == [7.0] * 4
        assert len(logs(first)) == 2
    assert server_processes(tmp_path) == []
    assert not list(Path(first.store).glob("work/serve/*/*"))


def test_a_server_that_is_killed_starts_again_and_the_step_goes_on(
    tmp_path: Path, served: list[str]
) -> None:
    options = ["score.judge.engine_args.delay=0.5", "score.judge.attempts=2"]
    config = load_config(QUICKSTART, [*served, *options, "score.judge.concurrency=1"])
    heard, killed = Heard(), threading.Event()

    def kill() -> None:
        heard.progress.wait()
        for each in server_processes(tmp_path):
            if "api_server" in " ".join(each.cmdline()):
                each.kill()
        killed.set()

    threading.Thread(target=kill, daemon=True).start()
    with observing(heard), run(config) as executor:
        assert scores(executor, score_step(config, tmp_path, rows=8)) == [7.0] * 8
    assert killed.is_set()
    assert len(logs(config)) == 2
    assert any("serve/model has ended" in each for each in heard.messages)
    assert any("starting again (1 of 3)" in each for each in heard.messages)


@pytest.mark.parametrize(
    ("option", "kind", "message", "starts", "said"),
    [
        ("ends=true", StageFailedError, "ended with exit code 1", 4, "the fake server ends"),
        ("no_option=9", UserError, "refuses an option", 1, "unrecognized arguments: --no-option"),
    ],
)
def test_a_server_that_does_not_start_fails_the_step_and_its_log_is_named(
    tmp_path: Path,
    served: list[str],
    option: str,
    kind: type[Exception],
    message: str,
    starts: int,
    said: str,
) -> None:
    config = load_config(QUICKSTART, [*served, f"score.judge.engine_args.{option}"])
    with run(config) as executor, pytest.raises(kind, match=message) as error:
        scores(executor, score_step(config, tmp_path))
    assert len(logs(config)) == starts
    assert str(logs(config)[0].parent) in str(error.value)
    assert all(said in log.read_text() for log in logs(config))


def test_a_run_that_stops_waits_for_no_server(tmp_path: Path, served: list[str]) -> None:
    config = load_config(QUICKSTART, served)
    with run(config) as executor:
        stop = threading.Thread(
            target=lambda: (wait_until(lambda: bool(logs(config))), executor.stop())
        )
        stop.start()
        with pytest.raises(StoppedError):
            scores(executor, score_step(config, tmp_path))
        stop.join()
    assert server_processes(tmp_path) == []


ORCHESTRATOR = """
import sys
from pathlib import Path
from flows.pipeline.loading import load_config
from tests.flows.test_servers import QUICKSTART, run, score_step, scores
config = load_config(QUICKSTART, sys.argv[2:])
with run(config) as executor:
    scores(executor, score_step(config, Path(sys.argv[1])))
    print("scored", flush=True)
    sys.stdin.read()
"""


def test_a_server_ends_with_an_orchestrator_that_is_killed(
    tmp_path: Path, served: list[str]
) -> None:
    command = [sys.executable, "-c", ORCHESTRATOR, str(tmp_path), *served]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env=os.environ, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "scored\n"
        assert len(server_processes(tmp_path)) >= 2
        process.kill()
    wait_until(lambda: not server_processes(tmp_path))


def test_the_model_and_its_options_are_in_the_key_and_the_address_is_not(
    tmp_path: Path, served: list[str]
) -> None:
    another = make_tiny_llama(tmp_path / "another", initializer_range=0.3)
    keys, servers = set(), set()
    for more in ([], [f"inputs.oracle_model={another}"], ["score.judge.engine_args.delay=0"]):
        config = load_config(QUICKSTART, [*served, *more])
        step, store = score_step(config, tmp_path), Store.open(config.store, create=True)
        request = build_request(config, store, step, {})
        keys.add(request.key)
        for runner in ("process", "slurm"):
            execution = config.execution.model_copy(update={"runner": runner})
            asked = Servers(store, execution, config.resources, threading.Event())
            server = asked.request_for(step, request)
            assert server is not None
            servers.add(server.key)
    # A server that listens to its own host is not one that jobs would find.
    assert (len(keys), len(servers)) == (3, 6)


def test_a_plan_knows_what_a_server_needs(
    tmp_path: Path, served: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEB_GPUS", "0,1")
    gpus = ["resources.serve.gpus=1", "resources.train.gpus=2"]
    with pytest.raises(UserError, match=r"serve\.gpus takes 1.*takes 2.*this host has 2"):
        plan(load_config(QUICKSTART, [*served, *gpus]))
    plan(load_config(QUICKSTART, [*served, gpus[0]]))
    without = f"execution.interpreters.serve={sys.executable}"
    with pytest.raises(UserError, match=r"by vLLM, which .* does not have"):
        plan(load_config(QUICKSTART, [*served, without]))
    with pytest.raises(UserError, match=r"needs inputs\.oracle_model or judge\.url"):
        plan(load_config(QUICKSTART, [*served, "inputs.oracle_model=null"]))
