"""Health of the places where runners start stages, for ``geb doctor --runner``.

A program that looks around runs there as a stage would, once for each kind of stage.
"""

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flows.pipeline.config import RunConfig
from flows.pipeline.placement import interpreter_of, stage_sections
from flows.runners.base import LOOK_STEP, Runner, time_limit
from stages.contract.errors import GebError
from stages.contract.events import Event, Log
from stages.contract.manifest import stages_digest
from stages.contract.params import Settings
from stages.contract.request import Request, Resources
from stages.harness.health import Health
from stages.store.base import Store
from stages.store.opening import local_folder

# Leases and logs compare clocks of hosts.
_MOST_CLOCK_SECONDS = 5.0
# A cluster may be busy, and an image be large.
_WAIT_SECONDS = 600.0


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at, and what was found, with the remedy if it is not ok."""

    name: str
    ok: bool
    detail: str


def stage_findings(
    make: Callable[[], Runner], config: RunConfig, settings_of: Callable[[str], Settings]
) -> Iterator[Finding]:
    """Tries the place of each kind of stage: stages that differ in nothing that the place sees."""
    kinds: dict[str, list[Request]] = {}
    for stage in stage_sections(type(config)):
        image = getattr(config, stage).image_for(from_hub=False)
        resources = getattr(config.resources, stage).model_copy(update={"nodes": 1})
        interpreter = interpreter_of(config.execution.interpreters, stage, image)
        kind = f"{settings_of(stage).model_dump_json()} {image} {interpreter} {resources.gpus > 0}"
        step, key = f"{LOOK_STEP}{stage}", "0" * 64
        values = {"run": config.name, "step": step, "key": key, "image": image}
        kinds.setdefault(kind, []).append(trial_request(stage, resources, **values))
    for requests in kinds.values():
        name = ", ".join(each.stage for each in requests)
        most = max(requests, key=lambda each: each.resources.gpus)
        try:
            yield Finding(name, *_try(make, config, most))
        except (GebError, OSError) as error:
            yield Finding(name, False, one_line(error))


@contextlib.contextmanager
def _trial_store(config: RunConfig) -> Iterator[str]:
    """An empty store beside the run's; that one itself if stages reach its bucket themselves."""
    if config.execution.stages_fetch(config.store):
        yield config.store
        return
    home = local_folder(config.store)
    place = next(each for each in (home, *home.parents) if each.is_dir())
    with tempfile.TemporaryDirectory(prefix=".geb-doctor-", dir=place) as folder:
        Path(folder).chmod(0o755)
        yield str(Store.open(f"{folder}/store", create=True).root)


def _try(make: Callable[[], Runner], config: RunConfig, request: Request) -> tuple[bool, str]:
    heard: list[tuple[Health, float]] = []

    def hear(event: Event) -> None:
        if isinstance(event, Log):
            with contextlib.suppress(ValidationError):
                health = Health.model_validate_json(event.message)
                heard.append((health, health.time - time.time()))

    with _trial_store(config) as store:
        runner = make()
        try:
            with time_limit(_WAIT_SECONDS, runner.stop_all):
                runner.run(request.model_copy(update={"store": store}), hear)
        finally:
            runner.stop_all()
    if not heard:
        return False, "it ended well and told nothing"
    [(health, ahead_seconds)] = heard
    wrong = "; ".join(faults_of(health, ahead_seconds=ahead_seconds, gpus=request.resources.gpus))
    seen = f"sees the store as user {health.user}, holds this code, {health.gpus} GPUs"
    return not wrong, wrong or seen


def faults_of(health: Health, *, ahead_seconds: float, gpus: int) -> Iterator[str]:
    """Faults of a place where stages are to run, each of which a stage would fail of.

    The clock there was ``ahead_seconds`` ahead of this machine's.
    """
    if health.store_error:
        yield f"it does not read the store: {health.store_error}"
    if health.code != stages_digest():
        yield (
            "it holds other code of the stages than this machine: install this version for the "
            "Python of execution.interpreters, or build and push its image again"
        )
    if abs(ahead_seconds) > _MOST_CLOCK_SECONDS:
        yield f"its clock is {ahead_seconds:+.0f} s off this machine's: leases would not hold"
    if health.gpus < gpus:
        yield f"it sees {health.gpus} GPUs of {gpus} that it asked for"


def trial_request(stage: str, resources: Resources, **more: Any) -> Request:
    """A request that says which stage asks for which resources, and no more than is given here."""
    said = {"version": "", "params": {}, "seed": 0, "inputs": {}, "key": "", "store": ""}
    said |= {"image": "core", "writes_registry": False}
    return Request.model_validate({**said, "stage": stage, "resources": resources, **more})


def one_line(error: Exception) -> str:
    """An error, its remedy included, as the detail of a finding."""
    return str(error).replace("\n", ";")
