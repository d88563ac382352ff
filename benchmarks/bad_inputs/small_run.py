"""A run in seconds: a tiny Llama, sixteen prompts, one iteration."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.flows.prefect_server import Server
from tests.tiny_models import make_tiny_llama, make_tiny_reward_model

_QUICKSTART = Path(__file__).parents[2] / "configs/quickstart.yaml"
_ORACLE = (
    "def score(prompts, responses, references):\n    return [len(each) for each in responses]\n"
)
NUMBERS = ("one", "two", "three", "four")
PROMPTS = [f"{first} {second} ?" for first in NUMBERS for second in NUMBERS]


def write_small_run(folder: Path) -> Path:
    """Writes the configuration, its policy, reward model, prompts and oracle into a folder."""
    make_tiny_llama(folder / "policy")
    make_tiny_reward_model(folder / "reward")
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS)
    )
    (folder / "oracle.py").write_text(_ORACLE)
    values: dict[str, Any] = {
        "extends": str(_QUICKSTART),
        "name": "small",
        "store": str(folder / "store"),
        "iterations": 1,
        "inputs": {
            "prompts": str(folder / "prompts.jsonl"),
            "policy": str(folder / "policy"),
            "warm_start": None,
            "oracle_code": str(folder / "oracle.py"),
        },
        "prepare": {"test_prompts": 4, "prompts_per_iteration": 8},
        "generate": {"max_new_tokens": 4},
        "train": {"epochs": 1, "global_batch_pairs": 8},
        "evaluation": {"num_samples": 1, "max_new_tokens": 4},
        "promote": {
            "better_than_base_confidence": None,
            "min_win_rate": None,
            "max_regression": None,
        },
        "execution": {"parallel": 1, "retries": 0},
    }
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@contextmanager
def prefect_server(folder: Path) -> Iterator[None]:
    """A Prefect server that every ``geb`` of the block uses; no hub is asked."""
    home = folder / "prefect"
    home.mkdir()
    server = Server(home)
    server.start()
    os.environ |= {
        "PREFECT_API_URL": server.api,
        "PREFECT_HOME": str(home),
        "GEB_STORE": str(folder / "store"),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    try:
        yield
    finally:
        server.stop()
