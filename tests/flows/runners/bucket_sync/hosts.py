"""Hosts that share a bucket, each with a stage that runs in this process."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from flows.pipeline.placement import Execution
from flows.runners.ending import Ending
from flows.runners.runner import Runner
from stages.contract.events import Event, Log
from stages.contract.params import InputSpec, StageParams
from stages.contract.request import Request, make_request
from stages.harness.context import StageContext
from stages.harness.program import Stage, execute
from stages.store.remote.store import RemoteStore
from tests.object_storage import objects
from tests.stage_calls import EventLog


class MakeParams(StageParams):
    stage: ClassVar[str] = "make"
    version: ClassVar[str] = "1"
    inputs = {"parts": InputSpec(optional=True, many=True)}
    text: str = "made"


class Done:
    """A stage that has ended well."""

    title = "nothing"

    def follow(self):
        return Ending("exited", 0)

    def remove(self):
        """Nothing is left."""


@dataclass
class Host:
    """A host of the bucket, whose stages run in this process.

    Attributes:
        store: The store as it sees it.
        body: What the stage does.
        requests: What its stages were asked.
        events: What they said.
    """

    store: RemoteStore
    body: Callable[[StageContext[Any]], None]
    sync_seconds: float = 1000.0
    name: str = "in this process"
    requests: list[Request] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def __post_init__(self):
        self.runner = Runner(self, Execution(sync_seconds=self.sync_seconds))

    def find(self, job):
        """Nothing outlives this process."""

    def start(self, job):
        """Runs a stage of which everything is here."""
        self.requests.append(job.request)
        execute(Stage(MakeParams, self.body), job.request, EventLog())
        return Done()

    def make(self, text="made", *inputs):
        """Makes an artifact through the bucket and returns it as this host finds it."""
        request = self.request(text, *inputs)
        os.environ["GEB_CACHE"] = str(self.store.root.parent)
        self.runner.run(request, self.events.append)
        return self.store.load(request.stage, request.key)

    def request(self, text, *inputs):
        """A request as an orchestrator makes it."""
        return make_request(
            MakeParams(text=text),
            inputs={"parts": inputs} if inputs else {},
            seed=0,
            store=self.store.location,
        )

    def said(self):
        """Everything that was logged."""
        return "\n".join(event.message for event in self.events if isinstance(event, Log))


def write(context):
    """Two files and a folder."""
    text = context.params.text
    (context.out / "large.txt").write_text(text * 1000)
    (context.out / "checkpoint").mkdir()
    (context.out / "checkpoint/weights").write_text(text + " weights")
    (context.out / "checkpoint/tokens").write_text(text + " tokens")


def local_files(store):
    folder = store.root / "artifacts"
    return {path.relative_to(folder).parts[2:][-1] for path in folder.rglob("*") if path.is_file()}


def object_of(store, name):
    """Bucket and key of the one object with this name."""
    [key_of] = [key for key in objects(store.location) if key.endswith(name)]
    return store.bucket.name, f"{store.bucket.prefix}/{key_of}"
