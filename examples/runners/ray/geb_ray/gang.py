"""Driver of a stage on a Ray cluster: ``python gang.py FOLDER``, with Ray's Python, on its head.

It starts the command of each node of ``FOLDER/plan.json`` on a host of its own, all at once, and
writes ``FOLDER/status.json`` last: the exit codes, None for a node that Ray has lost. A file
``FOLDER/stop`` ends all commands, and the failure of one ends the others.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

_LOOK_SECONDS = 0.5
# A lost node is heard of later than those that lost their connection to it.
_LOST_SECONDS = 60.0


@ray.remote(max_retries=0)
def run_node(command: list[str], folder: str, number: int, working_folder: str) -> int:
    """Runs the command of one node to its end; its output goes to files in the folder."""
    place = Path(folder)
    events, log = ((place / f"node{number}.{end}").open("w") for end in ("events", "log"))
    with events, log:
        # The supervisor ends the stage with its stdin: with this process, however that ends.
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=events, stderr=log, cwd=working_folder
        )
        is_asked = False
        while process.poll() is None:
            if not is_asked and (place / "stop").exists():
                is_asked = True
                process.terminate()
            time.sleep(_LOOK_SECONDS)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def run(folder: Path) -> dict[str, Any]:
    """Runs all nodes and returns the status."""
    plan = json.loads((folder / "plan.json").read_text())
    ray.init(address="auto", log_to_driver=False)
    nodes = placement_group([plan["bundle"]] * len(plan["commands"]), strategy="STRICT_SPREAD")
    try:
        ray.get(nodes.ready(), timeout=plan["pending_seconds"])
    except GetTimeoutError:
        wanted = f"{len(plan['commands'])} nodes with {plan['bundle']}"
        return {"error": f"Ray has not had {wanted} within {plan['pending_seconds']:g} s"}
    tasks = [
        run_node.options(
            num_cpus=plan["bundle"].get("CPU", 0),
            num_gpus=plan["bundle"].get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(nodes, number),
        ).remote(command, str(folder), number, plan["working_folder"])
        for number, command in enumerate(plan["commands"])
    ]
    (folder / "started").touch()
    codes: dict[int, int | None] = {}
    give_up_at = float("inf")
    while len(codes) < len(tasks) and time.monotonic() < give_up_at:
        left = [task for number, task in enumerate(tasks) if number not in codes]
        for task in ray.wait(left, timeout=_LOOK_SECONDS)[0]:
            number, code = tasks.index(task), None
            with contextlib.suppress(RayError):
                code = ray.get(task)
            codes[number] = code
            # The first node's end is the end of all, and so is the failure of another.
            if number == 0 or code != 0:
                (folder / "stop").touch()
                give_up_at = min(
                    give_up_at, time.monotonic() + plan["grace_seconds"] + _LOST_SECONDS
                )
    return {"codes": [codes.get(number) for number in range(len(tasks))]}


if __name__ == "__main__":
    place = Path(sys.argv[1])
    new = place / "status.new"
    new.write_text(json.dumps(run(place)))
    new.rename(place / "status.json")
