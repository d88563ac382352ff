"""Prefect's engine for a flow run, which takes the flows from where this file is.

    python -P -m flows.standing.engine

Prefect imports a flow from the present folder, if that has a package of this name.
"""

import importlib
import runpy

for name in ("compare", "evaluate", "iterate", "sweep"):
    importlib.import_module(f"flows.{name}")

if __name__ == "__main__":
    runpy.run_module("prefect.engine", run_name="__main__", alter_sys=True)
