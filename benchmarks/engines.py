"""Throughput of several engines of one generate stage against one, each on a core of its own.

    python -m benchmarks.engines [--engines 2] [--backends vllm transformers]

They are fed from one queue. A run with one engine comes before and after the one with several: what
the machine does besides shows in their difference. Exit code 1 where the several, by
response tokens a second, stay below nine tenths of their number times one.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from benchmarks.generation import Run, add_sampling_options, make_model, make_prompts, run_stage
from stages.contract.request import Resources

MARK = 0.9


def main() -> None:
    """Prints the table."""
    options = _options()
    # One thread for each engine; a single vLLM's is bound to no core, as those of several are not.
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    print("| backend | engines | tokens | seconds | tokens/s | times one |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    shares = [_compare(backend, options) for backend in options.backends]
    sys.exit(min(shares) < MARK)


def _compare(backend: str, options: argparse.Namespace) -> float:
    """Prints a backend's rows; returns the gain by the number of engines."""
    runs: list[tuple[int, Run]] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        make_model(folder / "model", options.model_shape)
        make_prompts(folder / "prompts.parquet", options.prompts, options.model_shape)
        for turn, engines in enumerate((1, options.engines, 1)):
            resources = Resources(processes=engines)
            label = f"{backend}-{turn}"
            runs.append((engines, run_stage(label, backend, folder, label, options, resources)))
    rates = [run.tokens / run.seconds for _, run in runs]
    one = (rates[0] + rates[-1]) / 2
    for (engines, run), rate in zip(runs, rates, strict=True):
        print(
            f"| {backend} | {engines} | {run.tokens:,} | {run.seconds:.1f} | {rate:,.0f} "
            f"| {rate / one:.2f} |",
            flush=True,
        )
    return rates[1] / one / options.engines


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--backends", nargs="+", default=["vllm", "transformers"])
    add_sampling_options(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
