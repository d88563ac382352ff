"""The runner of `examples/runners/skypilot` against a stand-in of `sky` on this machine."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.pipeline.placement import Execution
from flows.runners.base import PlaceNotice
from flows.runners.local.bucket_sync import BucketSyncRunner
from flows.runners.place import PlaceRunner
from stages.contract.errors import StageFailedError, UserError
from stages.contract.events import Event, Log
from stages.contract.request import Request, Resources
from stages.store.opening import open_store
from tests.flows.loop import ROOT
from tests.probe_requests import probe_request

pytestmark = pytest.mark.slow

# A job runs when its log is asked for, on a machine that has its variables and nothing else; a line
# and the exit code are as SkyPilot 0.14 has them.
SKY = f"""#!{sys.executable}
import os, subprocess, sys, yaml
from pathlib import Path
jobs = Path(__file__).with_name("jobs")
match sys.argv[1:4]:
    case ["jobs", "launch", "--yes"]:
        task = yaml.safe_load(Path(sys.argv[-1]).read_text())
        for each in sys.argv:
            if each.startswith("--secret="):
                name = each.removeprefix("--secret=")
                task["secrets"][name] = os.environ[name]
        jobs.mkdir(exist_ok=True)
        (jobs / task["name"]).write_text(yaml.safe_dump(task))
    case ["jobs", "logs", "--follow"]:
        task = yaml.safe_load((jobs / sys.argv[-1]).read_text())
        environment = {{name: os.environ[name] for name in ("PATH", "PYTHONPATH")}}
        environment |= task["envs"] | task["secrets"]
        done = subprocess.run(["bash", "-c", task["run"]], env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for line in done.stdout.splitlines():
            print(f"({{task['name']}}, pid=1234) {{line}}")
        sys.exit(100 if done.returncode else 0)
"""


@pytest.fixture
def runner(
    url: str,
    aws: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    probe_stage: None,
) -> Any:
    """Makes a runner with these settings, whose stages are probes."""
    monkeypatch.syspath_prepend(ROOT / "examples/runners/skypilot")
    from geb_skypilot.place import SkyPlace

    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "sky").write_text(SKY)
    (commands / "sky").chmod(0o755)
    path = f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    monkeypatch.setenv("PATH", path)
    monkeypatch.setenv("GEB_CACHE", str(tmp_path / "cache"))
    open_store(url, create=True)
    secrets = ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"]
    envs = {name: value for name, value in aws.items() if name not in secrets}

    def make(**changes: Any) -> BucketSyncRunner:
        given = {"registry": "ghcr.io/me", "secrets": secrets, "envs": envs}
        execution = Execution(sync_seconds=60).model_copy(
            update={"runner": "skypilot", "runner_settings": given | changes}
        )
        place = SkyPlace(execution)
        return BucketSyncRunner(PlaceRunner(place), execution.sync_seconds, place.sees)

    return make


def request_for(url: str, resources: Resources | None = None, **params: str) -> Request:
    return probe_request(open_store(url), resources, **params).model_copy(update={"store": url})


def test_a_stage_fetches_and_sends_by_itself(runner: Any, url: str) -> None:
    heard: list[Event] = []
    request = request_for(url, message="hello")
    runner().run(request, heard.append)
    assert Log(message="hello") in heard
    found = open_store(url).load("probe", request.key)
    assert found is not None
    assert found.file("result.txt").read_text() == "seed 0 hello"


def test_a_mistake_and_a_failure_are_told_apart(runner: Any, url: str) -> None:
    with pytest.raises(UserError, match="bad value 7"):
        runner().run(request_for(url, behaviour="refuse"), lambda event: None)
    with pytest.raises(StageFailedError, match="boom"):
        runner().run(request_for(url, behaviour="crash"), lambda event: None)


def test_a_dry_run_tells_the_task_and_starts_nothing(runner: Any, url: str) -> None:
    heard: list[Event] = []
    chosen = {"dry_run": True, "accelerators": {"probe": "H100:8"}, "resources": {"use_spot": True}}
    request = request_for(url, Resources(gpus=8, memory_gib=100))
    with pytest.raises(UserError, match="dry run"):
        runner(**chosen).run(request, heard.append)
    [told] = [each.message for each in heard if isinstance(each, PlaceNotice)]
    task = yaml.safe_load(told)
    assert task["resources"] == {
        "accelerators": "H100:8",
        "image_id": task["resources"]["image_id"],
        "memory": "100+",
        "use_spot": True,
    }
    assert task["secrets"] == {"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None}
    assert "stages.probe s3://" in task["run"]
    with pytest.raises(UserError, match=r"accelerators\.probe"):
        runner().run(request, heard.append)
