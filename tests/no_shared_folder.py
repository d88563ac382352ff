"""Stages that share no folder with their orchestrator, on any cluster: a bucket that both reach."""

import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flows.pipeline.placement import Execution
from flows.runners.choose import make_runner
from stages.contract.request import Request, Resources
from stages.store.opening import open_store
from tests.at_work import AtWork, at_work
from tests.flows.loop import ROOT, geb_ok, plan, result_digests, write_config
from tests.flows.probes import wait_until
from tests.object_storage import BUCKET, aws_environment, make_bucket, objects, s3_server
from tests.probe_requests import probe_request

CREDENTIALS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


@contextmanager
def bucket_at(address: str, folder: Path) -> Iterator[str]:
    """A store's place in a bucket that nodes reach at an address of this machine.

    It takes no manifest while ``folder/refusing`` exists.
    """
    server = s3_server(address, REFUSING=str(folder / "refusing"))
    with server as port, pytest.MonkeyPatch.context() as patch:
        for name, value in aws_environment(port, address).items():
            patch.setenv(name, value)
        # Not at a path that nodes see.
        patch.setenv("GEB_CACHE", str(folder / "cache"))
        make_bucket()
        yield f"s3://{BUCKET}/{uuid.uuid4().hex}"


def reach() -> dict[str, str]:
    """Variables, for all to see, by which a stage reaches the bucket."""
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    environment = {name: value for name, value in environment.items() if name not in CREDENTIALS}
    return environment | {"GEB_STORE_PATIENCE_SECONDS": "60"}


def probe_of(url: str, *resources: Resources, **params: str) -> Request:
    """A probe of a store in a bucket."""
    request = probe_request(open_store(url), *resources, **params)
    return request.model_copy(update={"store": url})


def check_loop(
    finished: Path, folder: Path, url: str, execution: Mapping[str, Any], **changes: Any
) -> None:
    """Runs the loop, which makes the artifacts that processes make."""
    # Prompts that no node sees, either.
    shutil.copytree(ROOT / "data/quickstart", folder / "data", dirs_exist_ok=True)
    prompts = {"prompts": str(folder / "data/prompts.jsonl")}
    config = write_config(folder, store=url, execution=execution, inputs=prompts, **changes)
    geb_ok("run", config)
    assert result_digests(url) == result_digests(finished.parent / "store")
    planned = plan(config, "--runner", "process")
    assert {step["action"] for step in planned.values()} == {"reuse"}, "processes find it all"


def check_killed_upload(
    request: Request, execution: Execution, folder: Path, kill: Callable[[AtWork], None]
) -> BaseException | None:
    """Kills a stage after its upload began; the next attempt makes the artifact whole.

    Returns the error of the first.
    """
    url, refusing = request.store, folder / "refusing"
    refusing.touch()
    with at_work(request, make_runner(execution), lambda event: True) as work:
        wait_until(lambda: work.error or any(key.endswith("/result.txt") for key in objects(url)))
        assert work.error is None
        kill(work)
        error = work.join()
    store = open_store(url)
    assert store.load("probe", request.key) is None
    refusing.unlink()
    make_runner(execution).run(request, lambda event: None)
    artifact = store.load("probe", request.key)
    assert artifact is not None
    store.verify(artifact)
    assert artifact.file("result.txt").read_text() == f"seed 0 {request.params['message']}"
    assert any(name.startswith("logs/probe/") for name in objects(url))
    return error
