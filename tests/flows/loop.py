"""The whole loop at small size, as a person runs it: the `geb` command in other processes."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import yaml

from stages.store.opening import open_store
from tests.forking import forked_python
from tests.programs import run_program

ROOT = Path(__file__).parents[2]

SMALL = {
    "extends": str(ROOT / "configs/quickstart.yaml"),
    "name": "small",
    "iterations": 1,
    "prepare": {"test_prompts": 16, "prompts_per_iteration": 48},
    "sft": {
        "architecture": {"hidden_size": 32, "intermediate_size": 64},
        "epochs": 1,
        "global_batch_rows": 128,
    },
    "train": {"checkpoint_every_steps": 1},
    "evaluation": {"num_samples": 2},
    "promote": {"better_than_base_confidence": None, "min_win_rate": None, "max_regression": None},
    "execution": {"parallel": 1, "retries": 0, "grace_seconds": 20},
}

# vLLM's CPU attention wants heads of 32.
VLLM_WARM_START = {
    "architecture": {
        "hidden_size": 64,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
    },
    "epochs": 1,
    "global_batch_rows": 128,
}


def write_config(folder, **changes):
    """Writes a small configuration whose store is in ``folder``; sections are merged."""
    values = json.loads(json.dumps(SMALL)) | {"store": str(folder / "store")}
    for name, value in changes.items():
        values[name] = {**values.get(name, {}), **value} if isinstance(value, dict) else value
    path = folder / f"{values['name']}.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def geb(*arguments, **environment):
    """Runs ``geb`` to its end; it and its stages are forks, see :mod:`tests.forking`."""
    command = (forked_python(), "-m", "flows.commands.cli", *arguments)
    return run_program(*command, env=os.environ | environment)


def geb_ok(*arguments, **environment):
    """Runs ``geb`` as :func:`geb` does; it must end well."""
    done = geb(*arguments, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def geb_json(*arguments, **environment):
    """The document that ``geb`` prints with ``--json``."""
    return json.loads(geb_ok(*arguments, "--json", **environment).stdout)


def geb_refused(*arguments, **environment):
    """The message of ``geb`` about a person's mistake, in words with one space between them."""
    done = geb(*arguments, **environment)
    message = " ".join(done.stderr.split())
    assert done.returncode == 64, message
    assert "Traceback" not in message
    assert "remedy" in message
    return message


def write_program(path, text):
    """Writes a program of the shell and returns its path."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@contextmanager
def started(
    *arguments,
    program=("-P", "-m", "flows.commands.cli"),
    in_foreground=False,
    folder=None,
    **environment,
):
    """A ``geb`` at work in a folder; it is gone afterwards, and so is whatever it started.

    As a terminal's job it leads a process group if it is in the foreground.
    """
    process = subprocess.Popen(
        [sys.executable, *program, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | environment,
        text=True,
        cwd=folder,
        start_new_session=in_foreground,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def wait_for_line(process, *parts):
    """Reads output until a line holds all ``parts``."""
    seen = []
    for line in process.stdout:
        seen.append(line)
        if all(part in line for part in parts):
            return line
    raise AssertionError(f"no line with {parts} in:\n{''.join(seen)}")


def stage_processes(process):
    """The stages' own processes below an orchestrator, without supervisors and fork servers."""
    children = []
    for child in psutil.Process(process.pid).children(recursive=True):
        # What it lists may have ended.
        with suppress(psutil.NoSuchProcess):
            command = " ".join(child.cmdline())
            if "-m stages." in command and "-m stages.harness." not in command:
                children.append(child)
    return children


def kill_stage(process):
    """Kills the one stage that an orchestrator has just started."""
    while not (stages := stage_processes(process)):
        # The supervisor is there before the stage is.
        assert process.poll() is None
    for stage in stages:
        stage.kill()


def steps(store, run="small"):
    """The run's steps by name, as ``geb status --json`` tells them."""
    return {step["step"]: step for step in geb_json("status", run, "--store", store)[run]["steps"]}


def manifests(store, run="small"):
    """Manifest of every finished step's artifact."""
    return {
        name: json.loads(
            (store / "artifacts" / step["stage"] / step["key"] / "manifest.json").read_text()
        )
        for name, step in steps(store, run).items()
        if step["state"] in ("done", "reused")
    }


def warm_started(finished):
    """Inputs that start from the finished run's warm-started policy instead of making one."""
    store = finished.parent / "store"
    checkpoint = store / "artifacts/sft" / steps(store)["sft"]["key"] / "checkpoint"
    return {"policy": str(checkpoint), "warm_start": None}


def plan(config, *arguments):
    """The lines of ``geb plan --json`` by step."""
    return {step["step"]: step for step in geb_json("plan", config, *arguments)}


def result_digests(store, run="small", without=""):
    """Digest of every finished step's artifact but one's, telemetry left out."""
    opened = open_store(str(store))
    digests_by_step = {}
    for name, step in steps(store, run).items():
        if name != without and step["state"] in ("done", "reused"):
            manifest = opened.manifest(step["stage"], step["key"])
            files = manifest.files.items()
            digests = {file: record.sha256 for file, record in files if not record.telemetry}
            digests_by_step[name] = json.dumps(digests)
    return digests_by_step
