"""A stand-in for the Hugging Face hub on the loopback interface.

It serves data sets in the way of the paper's rehearsal.
"""

import os
import sys
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.rehearsal_server import serve
from tests.programs import run_program

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def serve_dataset(repo, files):
    """Serves one data set repository; gives the endpoint's URL.

    Args:
        repo: ``owner/name``.
        files: Content by path in the repository.
    """
    with TemporaryDirectory() as folder:
        for name, content in files.items():
            path = Path(folder, "datasets", repo, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        with serve(Path(folder)) as url:
            yield url


def run_with_hub(url, request, folder):
    """Runs a stage as a program that asks this hub; its files lie in the folder."""
    request.write(folder / "request.json")
    # Neither a proxy nor the suite's offline mode stands between the client and the stand-in.
    environment = {
        name: value
        for name, value in os.environ.items()
        if not any(word in name.lower() for word in ("proxy", "offline"))
    } | {"HF_ENDPOINT": url, "HF_HOME": str(folder / "hf")}
    program = (sys.executable, "-m", f"stages.{request.stage}", folder / "request.json")
    return run_program(*program, env=environment)
