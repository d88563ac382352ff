"""A run whose store is a bucket, on hosts that have nothing else in common."""

import json
import os
import signal

import pytest

from tests.flows.loop import (
    geb_json,
    geb_ok,
    geb_refused,
    plan,
    result_digests,
    stage_processes,
    started,
    steps,
    wait_for_line,
    warm_started,
    write_config,
)
from tests.object_storage import SECRET, Gate, objects

pytestmark = pytest.mark.slow


def snapshots(url):
    """Objects of attempts that did not end."""
    return [
        content.decode() for name, content in objects(url).items() if name.endswith("snapshot.json")
    ]


def use_host(monkeypatch, folder):
    """Makes what is started from now on another host: nothing local is there."""
    monkeypatch.setenv("GEB_CACHE", str(folder))


def test_a_run_goes_on_and_ends_on_other_hosts(finished, tmp_path, url, monkeypatch, s3):
    config = write_config(
        tmp_path, store=url, inputs=warm_started(finished), execution={"sync_seconds": 0.2}
    )
    # Host A is killed in the middle of training, after a checkpoint of it reached the bucket.
    use_host(monkeypatch, tmp_path / "host-a")
    with started("run", config) as process:
        wait_for_line(process, "iteration-1/train:", "steps")
        # `walk` passes over folders that go while it looks. A checkpoint that is being written has
        # the file, too.
        while not any(
            "geb_state.json" in files and ".writing" not in folder
            for folder, _, files in os.walk(tmp_path / "host-a")
        ):
            assert process.poll() is None
        [stage] = stage_processes(process)
        stage.suspend()
        while not any("checkpoint-" in snapshot for snapshot in snapshots(url)):
            pass
        os.kill(process.pid, signal.SIGKILL)
        stage.kill()
        process.wait()
    # Host B goes on, through a network that breaks and comes back.
    use_host(monkeypatch, tmp_path / "host-b")
    resume = ("resume", "small", "--store", url)
    gate = Gate(s3)
    endpoint = f"http://127.0.0.1:{gate.port}"
    with started(*resume, AWS_ENDPOINT_URL=endpoint) as process:
        wait_for_line(process, "iteration-1/train:", "another host ended")
        gate.close()
        output, _ = process.communicate()
    assert process.returncode == 1
    assert f"at {endpoint} cannot be reached" in output
    assert "geb resume small --store s3://" in output
    assert SECRET not in output
    gate.end()
    geb_ok(*resume)
    assert result_digests(url) == result_digests(finished.parent / "store", without="sft")
    # Host C finds everything, and fetches only what the report shows.
    use_host(monkeypatch, tmp_path / "host-c")
    assert {step["action"] for step in plan(config).values()} == {"reuse"}
    again = geb_ok("run", config, "--json")
    assert {step["state"] for step in steps(url).values()} == {"reused", "done"}, "host B's"
    assert not list((tmp_path / "host-c").rglob("*.safetensors"))
    summary = json.loads(again.stdout)
    assert summary["checkpoint"].startswith(f"{url}/artifacts/train/")
    assert summary["report"] == f"{url}/runs/small/report.html"
    _check_commands(url)
    _check_secrets(url, tmp_path)


def _check_commands(url):
    def ask(*command):
        return geb_json(*command, "--store", url)

    assert ask("status")["small"]["state"] == "completed"
    [[version]] = [model["versions"] for model in ask("models").values()]
    assert version["version"] == 1
    assert ask("verify")["damaged"] == {}
    assert ask("report", "small")["report"].startswith("s3://")
    assert ask("gc") == []
    moved = geb_ok("promote", "small:1", "--alias", "candidate", "--store", url)
    assert "small@candidate is version 1" in moved.stdout
    geb_refused("promote", "small:9", "--alias", "candidate", "--store", url)


def _check_secrets(url, folder):
    kept = list(objects(url).values())
    kept += [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    assert not any(SECRET.encode() in data for data in kept)
