"""A disk that fills up, or becomes read-only, as a stage begins: in turn for each stage of a run.

    python -m benchmarks.bad_disks                   # as root; --only STAGE

A small run goes through once. For each case its store is copied to a file system of its own
(tmpfs), the stage's artifact is removed, and the run starts with an interpreter of that stage which
fills the file system, or covers it with a read-only view, once the stage has its folders and begins
its work. The run must fail with a message that names the place and what to do, without a traceback;
resumed on a sound disk it must end with the calm run's bytes. Exit code 1 if a case is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.bad_inputs.small_run import prefect_server
from tests.flows.loop import geb, result_digests, steps, write_config

_STEPS = {
    "prepare": "prepare",
    "sft": "sft",
    "generate": "iteration-1/generate/0",
    "score": "iteration-1/score/0",
    "pair": "iteration-1/pair",
    "train": "iteration-1/train",
    "evaluate": "iteration-1/evaluate",
    "promote": "iteration-1/promote",
}
# New paths lead to the read-only view; files that are open stay as they are.
_STRIKES = {
    "full disk": "dd if=/dev/zero of={disk}/ballast bs=64k 2>/dev/null",
    "read-only": "mount --bind {disk} {disk} && mount -o remount,bind,ro {disk}",
}
_HOOK = """
import os, sys

made = []

def hook(event, arguments):
    if event == "os.mkdir":
        made.append(str(arguments[0]))
    elif event in ("open", "import") and any("store/work" in each for each in made):
        made.clear()
        if not os.path.exists({struck!r}):
            open({struck!r}, "w").close()
            os.system({command!r})

sys.addaudithook(hook)
"""
_SAYS = {
    "full disk": re.compile(r"no space left|disk is full", re.I),
    "read-only": re.compile(r"read-only", re.I),
}
_HASH = re.compile(r"(?<=/)[0-9a-f]{64}|\d{8}-\d{6}Z-\S*")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


@contextmanager
def _disk(place: Path, calm: Path) -> Iterator[Path]:
    """A file system of its own at a place, with a copy of the calm run's store."""
    place.mkdir()
    size = 2 * int(subprocess.check_output(["du", "-sk", calm]).split()[0]) + (16 << 10)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "geb", place], check=True)
    try:
        shutil.copytree(calm, place / "store", copy_function=shutil.copy2)
        yield place
    finally:
        while subprocess.run(["umount", "-q", place], check=False).returncode == 0:
            pass


def _interpreter(folder: Path, disk: Path, fault: str) -> Path:
    """A Python that strikes the disk when a stage has its folders, once."""
    command = _STRIKES[fault].format(disk=disk)
    hook = _HOOK.format(struck=str(folder / "struck"), command=command)
    (folder / "sitecustomize.py").write_text(hook)
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nPYTHONPATH={folder}:$PYTHONPATH exec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return path


def _tried(folder: Path, config: Path, stage: str, fault: str) -> tuple[list[str], int, str]:
    """Faults found in a case (none if it is fine), the exit code, and the message of ``geb``."""
    calm, faults = config.parent / "store", []
    key = steps(calm)[_STEPS[stage]]["key"]
    with _disk(folder / "disk", calm) as disk:
        store = disk / "store"
        shutil.rmtree(store / "artifacts" / stage / key)
        python = _interpreter(folder, disk, fault)
        struck = f"execution.interpreters={{{stage}: {python}}}"
        failed = geb("run", config, "--set", f"store={store}", "--set", struck)
        said = _ANSI.sub("", failed.stderr + failed.stdout)
        if not (folder / "struck").exists():
            faults.append("the stage did not start")
        if failed.returncode == 0:
            faults.append("it ended well")
        if "Traceback" in said:
            faults.append("a traceback")
        found = re.search(rf"\({stage} [0-9a-f]{{12}}\): (.*?)(?:what is done|$)", said, re.S)
        message = found[1] if found else said[-1000:]
        if not _SAYS[fault].search(message):
            faults.append("the fault is not named")
        if str(disk) not in message:
            faults.append("the place is not named")
        if "remedy" not in message:
            faults.append("no remedy")
        with contextlib.suppress(OSError):
            (disk / "ballast").unlink()
        if fault == "read-only":
            subprocess.run(["umount", disk], check=True)
        again = geb("resume", "small", "--store", store)
        if again.returncode != 0:
            faults.append(f"resumed, it fails: {again.stderr[-500:]}")
        elif result_digests(store) != result_digests(calm):
            faults.append("other bytes than the calm run's")
    return faults, failed.returncode, _HASH.sub("…", message.replace(str(folder), "…"))


def main() -> int:
    """Tries each stage with each fault and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=list(_STEPS), help="one stage")
    asked = parser.parse_args()
    if os.geteuid() != 0:
        raise SystemExit("mounts take root")
    wrong = 0
    with TemporaryDirectory() as name, prefect_server(Path(name)):
        os.environ.pop("GEB_STORE")
        config = write_config(Path(name))
        done = geb("run", config)
        if done.returncode != 0:
            raise SystemExit(f"a good run fails:\n{done.stderr}{done.stdout}")
        sys.stdout.write("| stage | disk | exit code | resumed | message |\n")
        sys.stdout.write("| --- | --- | ---: | --- | --- |\n")
        for stage in [asked.only] if asked.only else _STEPS:
            for fault in _STRIKES:
                folder = Path(name) / f"{stage}-{fault.replace(' ', '-')}"
                folder.mkdir()
                faults, code, said = _tried(folder, config, stage, fault)
                wrong += bool(faults)
                end = f"WRONG: {', '.join(faults)}" if faults else "same bytes"
                sys.stdout.write(
                    f"| {stage} | {fault} | {code} | {end} | {' '.join(said.split())} |\n"
                )
                sys.stdout.flush()
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
