"""Steps that one program computes in turn, with one start of their engine."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from flows.execution.observer import Observer, observing
from flows.execution.recompute import recomputing
from flows.execution.shared_engines import later_with_engine, shares_engines
from flows.execution.step_executor import StepExecutor, StepResult
from flows.pipeline.placement import Execution
from flows.pipeline.step import Output, Step
from flows.report.status import step_logs
from flows.runners.base import OnEvent
from flows.runners.local.process import ProcessRunner
from stages.contract.errors import PreemptedError, StageFailedError, StoppedError, UserError
from stages.contract.events import Event, Log
from stages.contract.local_store import LocalStore
from stages.contract.request import FileInput, HubInput, Request, Resources
from stages.generate.params import GenerateParams
from tests.flows.probe_flow import ProbeConfig
from tests.probe_stage import ProbeParams, install

WAIT_SECONDS = 60.0


def probe(name: str, *, loads: str = "policy", seed: int = 0, behaviour: str = "work") -> Step:
    params = ProbeParams.model_validate(
        {"message": f"of {name}", "loads": loads, "behaviour": behaviour}
    )
    return Step(name, params, {}, seed)


class Told(Observer):
    """States of the steps and their messages, in the order in which they were told."""

    def __init__(self) -> None:
        self.states: list[tuple[str, str]] = []
        self.messages: list[tuple[str, str]] = []

    def step_started(self, request: Request) -> None:
        self.states.append((request.step, "started"))

    def stage_event(self, request: Request, event: Event) -> None:
        if isinstance(event, Log):
            self.messages.append((request.step, event.message))

    def step_ended(self, request: Request, state: str, seconds: float, message: str) -> None:
        self.states.append((request.step, state))

    def messages_of(self, step: str) -> list[str]:
        return [message for name, message in self.messages if name == step]


class Programs:
    """The process runner, which keeps the requests of its programs.

    Args:
        error: Raised by the first program, in place of its further steps.
        after: Steps that it computes before that.
    """

    name = "process"

    def __init__(self, error: Exception | None = None, after: int = 1) -> None:
        self.requests: list[Request] = []
        self._error = error
        self._after = after
        self._runner = ProcessRunner()
        self._at_work: list[object] = []
        self.most_at_once = 0

    @property
    def steps(self) -> list[list[str]]:
        return [[each.step for each in request.all] for request in self.requests]

    def run(self, request: Request, on_event: OnEvent) -> None:
        self.requests.append(request)
        error, self._error = self._error, None
        if error is None:
            with self._counted():
                self._runner.run(request, on_event)
            return
        for each in request.all[: self._after]:
            self._runner.run(each.model_copy(update={"then": ()}), on_event)
        # A preempted step gets further than the attempt before, and starts again.
        work = LocalStore.open(request.store).work_path(request.stage, request.key)
        work.mkdir(parents=True, exist_ok=True)
        (work / "checkpoint").touch()
        raise error

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        self._at_work.append(object())
        self.most_at_once = max(self.most_at_once, len(self._at_work))
        yield
        self._at_work.pop()

    def stop_all(self) -> None:
        self._runner.stop_all()

    def has_running(self, request: Request) -> bool:
        return False


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProbeConfig:
    install(tmp_path / "code", monkeypatch)
    return ProbeConfig(store=str(tmp_path / "store"), execution=Execution(retries=0))


def executor_of(config: ProbeConfig, programs: Programs) -> StepExecutor:
    executor = StepExecutor(config)
    executor.runner = programs
    return executor


def execute_all(executor: StepExecutor, *steps: Step) -> list[Future[StepResult]]:
    """Executes steps as a flow does: known beforehand, those with equal engines in turn."""
    later = later_with_engine(steps, lambda stage: getattr(executor.config.resources, stage))
    shared = shares_engines(executor.config.execution, executor.config.store)
    ended: list[Future[StepResult]] = []
    for step in steps:
        ended.append(Future())
        try:
            along = later.get(step.name, []) if shared else []
            ended[-1].set_result(executor.execute(step, {}, along))
        except BaseException as error:
            ended[-1].set_exception(error)
    return ended


def results(executor: StepExecutor, *steps: Step) -> list[str]:
    found = [each.result() for each in execute_all(executor, *steps)]
    assert not any(each.reused for each in found)
    return [(each.artifact.path / "result.txt").read_text() for each in found]


def test_one_program_computes_steps_that_load_the_same_engine(config: ProbeConfig) -> None:
    programs, told = Programs(), Told()
    with observing(told):
        executor = executor_of(config, programs)
        written = results(executor, probe("a", seed=1), probe("b", seed=2), probe("c", seed=3))
    assert written == ["seed 1 of a", "seed 2 of b", "seed 3 of c"]
    (computed,) = programs.steps
    assert sorted(computed) == ["a", "b", "c"]
    first, second, third = computed
    assert told.messages_of(first) == ["loads policy", f"of {first}"]
    goes_on = "goes on with the engine that {} has loaded"
    assert told.messages_of(second) == [goes_on.format(first), f"of {second}"]
    assert told.messages_of(third) == [goes_on.format(second), f"of {third}", "closes policy"]
    for name in computed:
        assert [state for step, state in told.states if step == name] == ["started", "done"]


def sampling(name: str, revision: str, *, after: Output | None = None, **params: object) -> Step:
    policy = HubInput(repo="some/model", revision=revision)
    prompts = after or FileInput(location="/prompts.parquet", digest="sha256:0")
    return Step(
        name, GenerateParams.model_validate(params), {"policy": [policy], "prompts": [prompts]}
    )


def test_steps_share_an_engine_if_it_loads_the_same_policy_with_the_same_settings() -> None:
    made_later = Output("first", GenerateParams, "prompts.parquet", "prompts")
    steps = [
        sampling("first", "a"),
        sampling("other policy", "b"),
        sampling("other precision", "a", dtype="float32"),
        sampling("hotter", "a", temperature=0.5),
        sampling("reads the first", "a", after=made_later),
    ]
    later = later_with_engine(steps, lambda stage: Resources())
    assert {name: [each.name for each in found] for name, found in later.items() if found} == {
        "first": ["hotter"]
    }


def test_each_step_has_a_log_of_its_own(config: ProbeConfig) -> None:
    executor = executor_of(config, Programs())
    results(executor, probe("a", seed=1), probe("b", seed=2))
    for record in executor.record.steps():
        (log,) = step_logs(executor.store, record)
        assert f"[info] of {record.step}" in log.read_text()


@pytest.mark.parametrize(
    ("error", "after", "first", "second"),
    [
        (StageFailedError("gone"), 0, StageFailedError, None),
        (UserError("bad prompt"), 0, UserError, None),
        (StageFailedError("gone"), 1, None, None),
        (UserError("bad prompt"), 1, None, None),
        (PreemptedError("taken"), 1, None, None),
    ],
)
def test_an_error_is_that_of_the_step_whose_turn_it_was(
    config: ProbeConfig,
    error: Exception,
    after: int,
    first: type[Exception] | None,
    second: type[Exception] | None,
) -> None:
    programs = Programs(error, after)
    executor = executor_of(config, programs)
    steps = {each.name: each for each in (probe("a", seed=1), probe("b", seed=2))}
    ended = dict(zip(steps, execute_all(executor, *steps.values()), strict=True))
    for name, wanted in zip(programs.steps[0], (first, second), strict=True):
        found = ended[name].exception()
        assert (type(found) if found else None) is wanted
    # As a retry of the task does.
    for name, wanted in zip(programs.steps[0], (first, second), strict=True):
        if wanted is not None:
            assert not executor.execute(steps[name], {}).reused


def test_a_step_whose_program_was_preempted_starts_again_alone(config: ProbeConfig) -> None:
    quick = config.execution.model_copy(update={"retry_delay_seconds": 0})
    programs = Programs(PreemptedError("taken"), after=0)
    executor = executor_of(config.model_copy(update={"execution": quick}), programs)
    results(executor, probe("a", seed=1), probe("b", seed=2))
    assert [len(each) for each in programs.steps] == [2, 2]


def test_a_program_that_could_not_be_started_leaves_its_other_steps_to_themselves(
    config: ProbeConfig,
) -> None:
    class Failing(Observer):
        failed = False

        def step_started(self, request: Request) -> None:
            if not self.failed:
                self.failed = True
                raise OSError("no space left on device")

    with observing(Failing()):
        executor = executor_of(config, Programs())
        ended = execute_all(executor, probe("a", seed=1), probe("b", seed=2))
    assert sorted(type(each.exception()).__name__ for each in ended) == ["NoneType", "OSError"]


def test_a_stopped_run_ends_both_steps(config: ProbeConfig) -> None:
    programs = Programs()
    executor = executor_of(config, programs)

    class Stopping(Observer):
        def stage_event(self, request: Request, event: Event) -> None:
            if isinstance(event, Log) and event.message.startswith("pids"):
                threading.Thread(target=executor.stop).start()

    with observing(Stopping()):
        ended = execute_all(executor, probe("a", behaviour="hang"), probe("b", behaviour="hang"))
    assert all(isinstance(each.exception(), StoppedError) for each in ended)
    assert len(programs.requests) == 1


@pytest.mark.parametrize(
    "other", ["another engine", "no engine", "computed before", "switched off"]
)
def test_other_steps_have_programs_of_their_own(config: ProbeConfig, other: str) -> None:
    programs = Programs()
    execution = config.execution.model_copy(update={"share_engines": other != "switched off"})
    executor = executor_of(config.model_copy(update={"execution": execution}), programs)
    second = probe("b", loads={"another engine": "q", "no engine": ""}.get(other, "policy"), seed=2)
    if other == "computed before":
        executor.execute(second, {})
        programs.requests.clear()
    execute_all(executor, probe("a", seed=1), second)
    assert all(len(each) == 1 for each in programs.steps)


def test_a_step_that_is_computed_again_on_purpose_is_set_aside_first(config: ProbeConfig) -> None:
    programs = Programs()
    steps = probe("a", seed=1), probe("b", seed=2)
    execute_all(executor_of(config, programs), *steps)
    with recomputing(lambda step: True):
        results(executor_of(config, programs), *steps)
    assert sorted(name for each in programs.steps[1:] for name in each) == ["a", "b"]


def test_the_time_limit_is_that_of_all_steps_together(config: ProbeConfig) -> None:
    limited = config.resources.model_copy(
        update={"probe": config.resources.probe.model_copy(update={"timeout_seconds": 100.0})}
    )
    programs = Programs()
    executor = executor_of(config.model_copy(update={"resources": limited}), programs)
    results(executor, probe("a", seed=1), probe("b", seed=2))
    assert [each.resources.timeout_seconds for each in programs.requests] == [200.0]
