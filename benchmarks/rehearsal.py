"""A rehearsal of the paper's experiments: every preset on tiny models, at a size for two cores.

    python -m benchmarks.rehearsal --store rehearsal        # --json

A hub answers on this machine. The figures mean nothing. A rehearsal cannot show that the hub's
repositories still have these names and columns, that models of billions of weights fit and how fast
they are, vLLM, DeepSpeed on several GPUs, answers of thousands of tokens, what URM says, and any
gain.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.rehearsal_server import serve
from flows.commands.common import answer_comparison, prefect_session, quiet_prefect
from flows.pipeline.config import RunConfig
from flows.pipeline.form import SETTINGS
from flows.pipeline.grid import cells
from flows.pipeline.presets import configs_folder, configured
from stages.contract.errors import GebError

NAME = "rehearsal"
"""Name of the sweep, with which the names of its runs begin."""
_MAKE = Path(__file__).parents[1] / "data/rehearsal/make.py"
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
def _local_hub(folder: Path) -> Iterator[None]:
    """Serves the hub to this process and its stages, from files in a folder."""
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
            yield
        finally:
            os.environ.clear()
            os.environ |= before


def presets() -> list[str]:
    """Names of the paper's experiments."""
    return sorted(path.stem for path in (configs_folder() / "paper").glob("*.yaml"))


def _small(preset: str, store: str) -> RunConfig:
    settings = []
    for suite in configured(preset, {}).suites:
        settings.append(f"suites.{suite}.evaluation.max_new_tokens={_TOKENS}")
        settings.append(f"suites.{suite}.evaluation.num_samples={_SUITE_SAMPLES}")
    if preset.startswith("math"):
        # The end of a turn has another number than in the paper's model.
        settings += ["prepare.test_prompts=4", f"generate.stop_token_ids=[{_END_OF_TURN}]"]
    return configured(preset, {**_SECTIONS, "store": store, SETTINGS: settings})


def main() -> None:
    """Prints the comparison of all presets; fails if a run did."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--store", default=NAME, help="folder of all results")
    parser.add_argument("--json", action="store_true", help="print the comparison's document")
    options = parser.parse_args()
    place = str(Path(options.store).absolute())
    quiet_prefect()
    # Here: Prefect reads its settings when it is imported.
    from flows.execution.stage_flow import call_as_flow
    from flows.sweep import sweep_cells

    planned = cells(NAME, [_small(preset, place) for preset in presets()], {}, [0])
    with prefect_session(place, NAME, options.json) as session, _local_hub(Path(place) / NAME):
        comparison = call_as_flow("sweep", NAME, lambda: sweep_cells(NAME, planned, 1, session))
    answer_comparison(options.json, comparison)


if __name__ == "__main__":
    main()
