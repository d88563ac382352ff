"""Stages that write files of the right names and compute nothing.

``python -m tests.flows.trivial_stages REQUEST.json`` answers any stage's request;
:func:`write_config` makes the process runner start it in place of the stage.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from stages.contract.events import Done, Emitter
from stages.contract.manifest import describe_files, make_manifest
from stages.contract.records import read_record
from stages.contract.request import Request
from stages.store.base import Store
from stages.tables.schemas import SCORES, write_table

ROOT = Path(__file__).parents[2]
STAGES = ("prepare", "sft", "generate", "score", "pair", "train", "evaluate", "promote")
# What other stages, and the report, look for.
_FILES = {
    "prepare": ("test.parquet", *(f"iteration-{t}.parquet" for t in range(1, 4))),
    "sft": ("checkpoint/model.safetensors",),
    "generate": ("responses.parquet",),
    "score": ("scores.parquet",),
    "pair": ("pairs.parquet", "metrics.json"),
    "train": ("checkpoint/model.safetensors", "summary.json", "metrics.jsonl"),
    "evaluate": ("metrics.json", "figures.parquet", "prompts.parquet", "samples.jsonl"),
    "promote": ("decision.json",),
}
_WHEN = "2000-01-01T00:00:00+00:00"


def answer(request: Request) -> Path:
    """Publishes an artifact for a request and returns its folder."""
    store = Store.open(request.store)
    scratch = store.new_scratch(request.stage, request.key)
    # What the report reads of evaluations; the key makes each answer its own.
    rows = [
        {"model": model, "prompt_id": "p", "figure": "mean_reward", "key": request.key}
        | {"value": 0.0, "low": 0.0, "high": 0.0, "total": 0.0, "count": 1}
        for model in ("policy", "base")
    ]
    score = {"prompt_id": "p", "sample_index": 0, "score": 0.0, "error": None, "components": None}
    for name in _FILES[request.stage]:
        path = scratch / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if request.stage == "score":
            write_table(path, SCORES, [score | {"oracle": request.key}])
        elif path.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        else:
            text = '{"gates": [], "aliases": [], "compared_prompts": 1}'
            path.write_text(text if path.suffix == ".json" else "")
    files = describe_files(scratch, set())
    manifest = make_manifest(request, files=files, started=_WHEN, ended=_WHEN)
    return store.publish(scratch, manifest).path


def interpreter(folder: Path) -> dict[str, str]:
    """``execution.interpreters`` with a program that answers for every stage."""
    program = folder / "trivial-python"
    program.write_text(
        "#!/bin/sh\n"
        # Stages start with `-P -m MODULE REQUEST`.
        'case "$2 $3" in\n'
        f'"-m stages.harness."*) exec {sys.executable} "$@" ;;\n'
        f'"-m "*) cd {ROOT} && exec {sys.executable} -m tests.flows.trivial_stages "$4" ;;\n'
        f'*) exec {sys.executable} "$@" ;;\n'
        "esac\n"
    )
    program.chmod(0o755)
    return {stage: str(program) for stage in STAGES}


def write_config(folder: Path, name: str, *, parallel: int) -> Path:
    """One iteration of the quickstart in one shard, its stages replaced by trivial ones."""
    values = {
        "extends": str(ROOT / "configs/quickstart.yaml"),
        "name": name,
        "iterations": 1,
        "store": str(folder / "store"),
        "generate": {"num_shards": 1},
        # A fork server would run the stages themselves.
        "execution": {
            "parallel": parallel,
            "interpreters": interpreter(folder),
            "fork_server": False,
        },
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


if __name__ == "__main__":
    Emitter(sys.stdout).emit(Done(path=str(answer(read_record(Path(sys.argv[1]), Request)))))
