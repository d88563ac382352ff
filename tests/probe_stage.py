"""A stage that behaves as a test asks it to, put where ``python -m stages.probe`` finds it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar, Literal

import numpy

import stages
from stages.contract.errors import StoppedError, UserError
from stages.contract.params import StageParams
from stages.contract.request import make_request
from stages.harness.program import Stage, deferred_stop

ROOT = Path(stages.__file__).parent.parent


class ProbeParams(StageParams):
    """Behaviour of the probe."""

    stage: ClassVar[str] = "probe"
    version: ClassVar[str] = "1"

    message: str = ""
    prints: str = ""
    behaviour: Literal[
        "work",
        "refuse",
        "crash",
        "kill_self",
        "hang",
        "ignore_sigterm",
        "leave_child",
        "hang_once",
        "tell_place",
        "eat_memory",
        "write",
        "tell_environment",
        "leave_daemon",
        "save_when_stopped",
        "draw",
    ] = "work"
    path: str = ""


def run(ctx):
    print(ctx.params.prints)
    ctx.events.progress(0, 1, "things")
    ctx.events.info(ctx.params.message)
    (ctx.out / "half-written.txt").write_text("half")
    match ctx.params.behaviour:
        case "refuse":
            raise UserError("bad value 7", "use 8")
        case "crash":
            raise RuntimeError("boom")
        case "tell_place":
            worker = os.environ.get("GEB_WORKER")
            ctx.events.info(f"worker {worker}, GPUs {os.environ.get('CUDA_VISIBLE_DEVICES')!r}")
        case "hang_once" if not (ctx.work / "hung").exists():
            (ctx.work / "hung").touch()
            _hang(ctx)
        case "kill_self":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang" | "ignore_sigterm" | "leave_child":
            _hang(ctx)
        case "eat_memory":
            eaten = []
            while True:
                eaten.append(b"x" * (16 << 20))
        case "write":
            Path(ctx.params.path).write_text("written")
        case "leave_daemon":
            daemon = subprocess.Popen(["sleep", "1000"], start_new_session=True)
            Path(ctx.params.path).write_text(str(daemon.pid))
            # The supervisor, which would find it.
            os.kill(os.getppid(), signal.SIGKILL)
            _hang(ctx)
        case "save_when_stopped" if not (ctx.work / "saved").exists():
            with deferred_stop() as stop_requested:
                _tell_pids(ctx)
                while not stop_requested():
                    ctx.events.metric(1, loss=1.0)
                    time.sleep(0.01)
                # More than a pipe holds, by both ways.
                for number in range(5000):
                    print(f"line {number} before the end")
                    ctx.events.info(f"message {number} before the end")
                (ctx.work / "saved").write_text("saved")
            raise StoppedError("asked to stop (SIGTERM)")
        case "draw":
            ctx.events.info(f"drawn {numpy.random.random()}")
        case "tell_environment":
            ctx.events.info(f"{ctx.params.message} is {os.environ.get(ctx.params.message)}")
    (ctx.out / "half-written.txt").unlink()
    (ctx.out / "result.txt").write_text(f"seed {ctx.request.seed} {ctx.params.message}")


def _hang(ctx):
    if ctx.params.behaviour == "ignore_sigterm":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _tell_pids(ctx)
    time.sleep(1000)


def _tell_pids(ctx):
    pids = [os.getpid()]
    if ctx.params.behaviour in ("leave_child", "save_when_stopped"):
        sleeper = [sys.executable, "-c", "import time; time.sleep(1000)"]
        pids.append(subprocess.Popen(sleeper, start_new_session=True).pid)
    ctx.events.info("pids " + " ".join(str(pid) for pid in pids))


STAGE = Stage(ProbeParams, run)


MAIN = "from stages.harness.program import main\nfrom tests.probe_stage import STAGE\nmain(STAGE)\n"
"""Its ``__main__.py``."""


def install(folder, monkeypatch):
    """Makes ``stages.probe`` importable in subprocesses, through another package path."""
    package = folder / "stages" / "probe"
    package.mkdir(parents=True)
    (folder / "stages" / "__init__.py").write_text(
        f"__path__ = [{str(folder / 'stages')!r}, {str(ROOT / 'stages')!r}]\n"
    )
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(MAIN)
    # The fork server loads it, and with it what the stage imports.
    (package / "run.py").write_text("from tests.probe_stage import STAGE\n")
    # `python -m` looks in the working directory first.
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{ROOT}")


def probe_request(store, resources=None, **params):
    """A request for one probe with these parameters."""
    return make_request(
        ProbeParams(**params),
        inputs={},
        seed=0,
        store=str(store.root),
        run="test",
        step="probe/0",
        resources=resources,
    )
