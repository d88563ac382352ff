"""Execution of a step: its artifact is found in the store, or a stage computes it."""

import contextlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flows.execution.observer import Observer, StepReporter
from flows.execution.run_record import RunRecord, StepState
from flows.pipeline.config import RunConfig
from flows.pipeline.step import Output, Source, Step
from flows.runners.choose import make_runner
from stages.contract.atomic import explain_disk_errors
from stages.contract.errors import (
    DamagedArtifactError,
    GebError,
    PreemptedError,
    StoppedError,
)
from stages.contract.events import warning_to
from stages.contract.request import Input, Request, make_request
from stages.store.base import Artifact, Store
from stages.store.opening import open_store

# Most preemptions in a row without a new checkpoint.
_MOST_PREEMPTIONS = 20
RETRY_SECONDS = 5.0
"""Pause before another attempt."""
# The pause of 5 seconds grows to 5 minutes.
_MOST_DOUBLINGS = 6


@dataclass(frozen=True)
class StepResult:
    """Artifact of a step, and whether it was in the store already."""

    artifact: Artifact
    reused: bool


def build_request(
    config: RunConfig, store: Store, step: Step, artifacts: Mapping[str, Artifact]
) -> Request:
    """The request for a step whose upstream artifacts are known."""

    def reference(source: Source) -> Input:
        return artifacts[source.step].ref(source.path) if isinstance(source, Output) else source

    return make_request(
        step.params,
        inputs={name: list(map(reference, group)) for name, group in step.inputs.items()},
        seed=step.seed,
        store=store.location,
        run=config.name,
        step=step.name,
        resources=getattr(config.resources, step.stage),
    )


class StepExecutor:
    """Store, runner and record of one run; turns steps into artifacts, from several threads."""

    def __init__(self, config: RunConfig, observers: Sequence[Observer] = ()) -> None:
        self.config = config
        self.store = open_store(config.store, create=True)
        self.record = RunRecord(self.store, config.name)
        self.runner = make_runner(config.execution)
        self._observers = observers
        self._end: StepState = "stopped"
        self._slots = threading.Semaphore(config.execution.parallel)

    @property
    def stopping(self) -> bool:
        """True once :meth:`stop` was called."""
        return self.runner.stopping.is_set()

    def stop(self, end: StepState = "stopped") -> None:
        """Ends all running stages and every wait; returns when the stages are gone.

        Steps that this ends get the state ``end``: `stopped` or `cancelled`.
        """
        if not self.stopping:
            self._end = end
        self.runner.stop_all()

    def execute(
        self, step: Step, upstream: Mapping[str, Artifact], *observers: Observer
    ) -> StepResult:
        """Finds the artifact of a step in the store, or runs its stage.

        The step's own ``observers`` hear of it after the run's.
        """
        request = build_request(self.config, self.store, step, upstream)
        status = StepReporter(self.record, step, request, (*self._observers, *observers))
        try:
            with explain_disk_errors(self.store.root):
                status.looked_up()
                warn = warning_to(status.event)
                existing = self.store.find(request.stage, request.key, warn=warn)
                if existing is None:
                    self._compute(request, status)
                artifact = existing or self._computed_artifact(request)
        except BaseException as error:
            is_stopped = isinstance(error, StoppedError | KeyboardInterrupt)
            # If the store failed, its error is the one to report.
            with contextlib.suppress(GebError):
                status.ended(self._end if is_stopped else "failed", str(error))
            raise
        status.ended("reused" if existing else "done")
        return StepResult(artifact, reused=existing is not None)

    def _compute(self, request: Request, status: StepReporter) -> None:
        """Runs the stage; again after preemptions, unless too many saved nothing."""
        seen = {self.store.work_files(request.stage, request.key)}
        in_a_row = 0
        while True:
            with self._slots:
                # A stage that its place has lost sight of may still be at work: it goes on.
                ends = self.runner.stopping if in_a_row else self.runner.closed
                if ends.is_set():
                    raise StoppedError(f"{request.title}: not started, the run ends")
                status.started()
                try:
                    return self.runner.run(request, status.event)
                except PreemptedError as error:
                    if self.stopping:
                        raise StoppedError(f"{request.title}: {error}") from error
                    saved = self.store.work_files(request.stage, request.key)
                    in_a_row = in_a_row + 1 if saved in seen else 1
                    if in_a_row > _MOST_PREEMPTIONS:
                        raise PreemptedError(
                            f"{error}; {in_a_row} in a row without a new checkpoint",
                            error.last_lines,
                        ) from error
                    seen.add(saved)
                    status.preempted(str(error))
            # A node that comes and goes would use them up within a minute.
            pause = RETRY_SECONDS * 2 ** min(in_a_row - 1, _MOST_DOUBLINGS)
            self.runner.stopping.wait(pause)

    def _computed_artifact(self, request: Request) -> Artifact:
        """The artifact of a stage that has just ended well."""
        artifact = self.store.load(request.stage, request.key)
        if artifact is None:
            hint = " Or did its input `code` end the process?" if "code" in request.inputs else ""
            raise DamagedArtifactError(
                f"{request.title} ended well, but {self.store.location} has no artifact "
                f"{request.stage}/{request.key[:12]}: does the stage see the same store?{hint}"
            )
        return artifact
