"""Stages in vLLM's environment, several in one process: importing vLLM costs more than an engine.

As a program, ``python -m tests.stages.generate.vllm_session`` reads paths of requests from stdin,
executes one after the other and answers each with a JSON line: the exit code that the stage's own
program would have, and its events.
"""

import gc
import importlib
import io
import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
PYTHON = Path(os.environ.get("GEB_VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))
# vLLM on a CPU takes this for keys and values, in GiB, where the engine's argument does not say.
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "VLLM_LOGGING_LEVEL": "WARNING",
}


class VllmSession:
    """The other end of the program.

    Args:
        log: File for what the program and its engines print.
    """

    def __init__(self, log: Path) -> None:
        assert PYTHON.exists(), f"no interpreter at {PYTHON}: run `make setup-vllm`"
        self.log = log
        with log.open("w") as file:
            self._program = subprocess.Popen(
                [str(PYTHON), "-m", "tests.stages.generate.vllm_session"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env=ENVIRONMENT,
            )

    def execute(self, request: Any, path: Path) -> tuple[int, list[dict[str, Any]]]:
        """Executes a request and returns exit code and events."""
        request.write(path)
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        self._program.stdin.write(f"{path}\n")
        self._program.stdin.flush()
        line = self._program.stdout.readline()
        assert line, f"the program is gone:\n{self.log.read_text()[-4000:]}"
        answer = json.loads(line)
        return answer["code"], answer["events"]

    def finish(self, request: Any, path: Path) -> Path:
        """Executes a request that must succeed and returns the artifact's folder."""
        from stages.store.base import Store

        code, events = self.execute(request, path)
        assert code == 0, f"{events}\n{self.log.read_text()[-4000:]}"
        artifact = Store.open(request.store).load(request.stage, request.key)
        assert artifact is not None
        return artifact.path

    def close(self) -> None:
        """Ends the program."""
        self._program.kill()
        self._program.communicate()


@contextmanager
def vllm_session(folder: Path) -> Any:
    """A session that ends with the ``with`` statement."""
    session = VllmSession(folder / "session.log")
    try:
        yield session
    finally:
        session.close()


def _serve() -> None:
    # Engines print to stdout; answers keep it to themselves.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        code, events = _execute(Path(line.strip()))
        parsed = [json.loads(line) for line in events.getvalue().splitlines()]
        answers.write(json.dumps({"code": code, "events": parsed}) + "\n")
        answers.flush()
        # The engine is gone with its last reference, its memory too.
        gc.collect()


def _execute(path: Path) -> tuple[int, io.StringIO]:
    from stages.contract.errors import EXIT_FAILED, EXIT_OK, EXIT_USER, UserError
    from stages.contract.events import Emitter, Failure
    from stages.contract.records import read_record
    from stages.contract.request import Request
    from stages.harness.program import execute

    stream = io.StringIO()
    events = Emitter(stream)
    request = read_record(path, Request)
    stage = importlib.import_module(f"stages.{request.stage}.run").STAGE
    try:
        execute(stage, request, events)
    except UserError as error:
        events.emit(Failure(kind="user", message=error.message, remedy=error.remedy))
        return EXIT_USER, stream
    except Exception as error:
        events.emit(Failure(kind="crash", message=f"{type(error).__name__}: {error}"))
        return EXIT_FAILED, stream
    return EXIT_OK, stream


if __name__ == "__main__":
    _serve()
