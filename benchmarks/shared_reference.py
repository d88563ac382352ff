"""Trainings under several κ on the same pairs: the first computes log π_ref, the others take it.

    python -m benchmarks.shared_reference POLICY PAIRS

PAIRS is the `pairs.parquet` of a run of that policy's.
"""

from __future__ import annotations

import argparse
import io
import tempfile
import time
from pathlib import Path

from stages.contract.events import Emitter
from stages.contract.request import make_request
from stages.harness.program import execute
from stages.store.base import Store
from stages.train.params import TrainParams
from stages.train.run import STAGE
from tests.stage_calls import file_input


def main() -> None:
    """Prints a row for each κ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("policy", type=Path)
    parser.add_argument("pairs", type=Path)
    asked = parser.parse_args()
    inputs = {name: [file_input(asked.policy)] for name in ("policy", "reference")}
    inputs["pairs"] = [file_input(asked.pairs)]
    print("| store | κ | seconds |\n| --- | --- | ---: |")
    # The first row has the imports in it.
    for store in ("first", "second"):
        with tempfile.TemporaryDirectory() as folder:
            Store.open(folder, create=True)
            for kappa in (0.1, 1.0):
                params = TrainParams(kappa=kappa, epochs=1, global_batch_pairs=32)
                request = make_request(params, inputs=inputs, seed=0, store=folder)
                began = time.monotonic()
                execute(STAGE, request, Emitter(io.StringIO()))
                print(f"| {store} | {kappa:g} | {time.monotonic() - began:.0f} |", flush=True)


if __name__ == "__main__":
    main()
