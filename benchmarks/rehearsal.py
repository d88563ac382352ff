"""A rehearsal of the paper's full table: every row on tiny models, at a size for two cores.

    python -m benchmarks.rehearsal --store rehearsal        # --only NAME, --json

A hub answers on this machine.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.rehearsal_server import serve
from experiments.paper.tables import paper_rows
from experiments.study import Row
from flows.commands.common import answer, prefect_session, quiet_prefect
from flows.pipeline.presets import configured
from stages.contract.errors import GebError

NAME = "rehearsal"
"""Name of the rehearsal's report, with which the names of its runs begin."""
TITLE = (
    "A rehearsal on tiny models and made-up rows: its figures mean nothing. It cannot show "
    "that the hub's repositories still have these names and columns, that models of billions of "
    "weights fit and how fast they are, vLLM, DeepSpeed on several GPUs, answers of thousands of "
    "tokens, what URM says, and any gain."
)
"""Title of its report."""
_MAKE = Path(__file__).parents[1] / "data/rehearsal/make.py"
_SEEDS = _VALUES = 2
_TOKENS = 16
_SUITE_SAMPLES = 16
_END_OF_TURN = 1
_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
_SECTIONS: Mapping[str, Any] = {
    "generate": {"backend": "transformers", "max_new_tokens": _TOKENS, "num_shards": 1},
    "evaluation": {"num_samples": 4, "max_new_tokens": _TOKENS},
    "train": {
        "global_batch_pairs": 4,
        "learning_rate": 1e-4,
        "micro_batch_tokens": 1024,
        "deepspeed": {"zero_stage": "off"},
    },
    "resources": {stage: {"gpus": 0} for stage in ("generate", "score", "train", "evaluate")},
    "execution": {"interpreters": {"generate": sys.executable}},
}


@contextmanager
def rehearsal(folder: Path) -> Iterator[list[Row]]:
    """Serves the hub to this process and its stages, from files in a folder; yields the rows."""
    hub = folder / "hub"
    before = dict(os.environ)
    process = subprocess.run(
        [sys.executable, str(_MAKE), str(hub)], capture_output=True, text=True, check=False
    )
    if process.returncode:
        raise GebError(f"the rehearsal's models cannot be made: {process.stderr[-2000:]}")
    with serve(hub) as address:
        os.environ |= {
            "HF_ENDPOINT": address,
            "HF_HOME": str(folder / "huggingface"),
            "NO_PROXY": "127.0.0.1",
        }
        for name in _OFFLINE:
            os.environ.pop(name, None)
        try:
            yield _rows()
        finally:
            os.environ.clear()
            os.environ |= before


def _rows() -> list[Row]:
    """The full table's rows. Rows that Figure 3 is of choose κ; others have their presets'."""
    drawn = {row.names[1:] for row in paper_rows("full") if row.experiment == "kappa"}
    rows = []
    for row in paper_rows("full"):
        if row.names[1:] not in drawn or row.experiment == "responses":
            fields = {name: row.fields[name] for name in row.fields if name != "train.target_ratio"}
            row = replace(row, fields=fields, coefficients=())
        rows.append(_small(row))
    return rows


def _small(row: Row) -> Row:
    fields = dict(row.fields)
    for name in configured(row.configuration, {}).suites:
        fields[f"suites.{name}.evaluation.max_new_tokens"] = _TOKENS
        fields[f"suites.{name}.evaluation.num_samples"] = _SUITE_SAMPLES
    if row.experiment == "hard":
        # The end of a turn has another number than in the paper's model.
        fields["prepare.test_prompts"] = 4
        fields["generate.stop_token_ids"] = [_END_OF_TURN]
    return replace(
        row,
        prefix=NAME,
        fields=fields,
        coefficients=row.coefficients[:_VALUES],
        seeds=row.seeds[:_SEEDS],
    )


def main() -> None:
    """Prints which rows are whole and where the report is; fails if a run did."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--store", default=NAME, help="folder of all results")
    parser.add_argument("--only", action="append", default=[], help="as for `geb paper`")
    parser.add_argument("--json", action="store_true", help="print the report's document")
    options = parser.parse_args()
    place = str(Path(options.store).absolute())
    quiet_prefect()
    # Here: Prefect reads its settings when it is imported.
    from experiments.paper.flow import compute
    from flows.execution.stage_flow import call_as_flow

    with (
        prefect_session(place, NAME, options.json) as session,
        rehearsal(Path(place) / NAME) as rows,
    ):
        config = {**_SECTIONS, "store": place}
        rehearse = partial(compute, NAME, TITLE, rows, options.only, 1, config, session)
        document = call_as_flow(NAME, NAME, rehearse)
    answer(options.json, document, document["coverage"], f"report  {document['page']}")


if __name__ == "__main__":
    main()
