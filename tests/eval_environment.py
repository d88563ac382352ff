"""Stages in the environment that ``make setup-eval`` makes.

``GEB_EVAL_PYTHON`` names another interpreter than ``.venv-eval/bin/python``.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from stages.contract.errors import EXIT_OK
from stages.contract.events import parse_event
from stages.contract.request import Request
from tests.flows.loop import ROOT
from tests.lacking import lacking
from tests.programs import run_program

PYTHON = Path(os.environ.get("GEB_EVAL_PYTHON", ROOT / ".venv-eval/bin/python"))


def need_eval_environment() -> None:
    """Skips a test where the environment is not made."""
    if not PYTHON.exists():
        lacking(f"no interpreter at {PYTHON}: run `make setup-eval`")


def write_punkt(folder: Path) -> Path:
    """Writes nltk's data `punkt_tab` as an untrained splitter of sentences has it."""
    place = folder / "tokenizers/punkt_tab/english"
    place.mkdir(parents=True)
    for name in ("collocations.tab", "sent_starters.txt", "ortho_context.tab"):
        (place / name).write_text("")
    (place / "abbrev_types.txt").write_text("dr\nmr\n")
    return folder


def run_there(
    request: Request, folder: Path, environment: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Runs a stage as a program in the environment; gives its exit code and its last words."""
    need_eval_environment()
    path = folder / f"{request.key}.json"
    request.write(path)
    offline = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    whole = {**os.environ, **offline, **(environment or {})}
    done = run_program(PYTHON, "-m", f"stages.{request.stage}", path, env=whole)
    last = str(parse_event(done.stdout.splitlines()[-1]))
    return done.returncode, last if done.returncode == EXIT_OK else f"{last}\n{done.stderr[-2000:]}"
