"""Programs and rows of the tasks in the folder `data`."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

DATA = Path(__file__).parents[2] / "data"


def load(task: str, name: str) -> ModuleType:
    """A program of a task, as a module."""
    spec = importlib.util.spec_from_file_location(f"{task}_{name}", DATA / task / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(task: str, name: str) -> list[dict[str, Any]]:
    """Rows of a task's file."""
    return [json.loads(line) for line in (DATA / task / name).read_text().splitlines()]
