"""Sections in order of worth, each a process with a time limit; a line of JSON for each figure.

    python -m benchmarks.gpu --minutes 9                  # adds lines to gpu-figures.jsonl
    python -m benchmarks.gpu --minutes 4 --only card head step-1b
    python -m benchmarks.gpu --dry                        # tiny shapes, on the CPU

Needs no network. A section that fails, or takes longer than it may, stops no other.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

LIMITS = {
    "card": 60,
    "head": 90,
    "step-1b": 140,
    "step-8b": 200,
    "defaults-1b": 60,
    "defaults-8b": 140,
    "lora-truth": 90,
    "zero-1b": 120,
    "sampling": 90,
}
"""Sections, and their limits in seconds."""


def main() -> None:
    """Runs the sections; exit code 1 if one of them wrote an error or none of its figures."""
    options = _options()
    if options.section is not None:
        measure(options.section, options.output, dry=options.dry)
        return
    ends = time.monotonic() + 60 * options.minutes
    failed = [
        name
        for name in options.only or LIMITS
        if not _run(name, min(LIMITS[name], ends - time.monotonic()), options)
    ]
    print(f"figures: {options.output.absolute()}; sections with errors: {failed or 'none'}")
    sys.exit(bool(failed))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=9.0, help="for all sections together")
    parser.add_argument("--only", nargs="+", choices=LIMITS, help="in this order")
    parser.add_argument("--dry", action="store_true", help="tiny shapes, on the CPU")
    parser.add_argument("--output", type=Path, default=Path("gpu-figures.jsonl"))
    parser.add_argument("--section", choices=LIMITS, help=argparse.SUPPRESS)
    return parser.parse_args()


def _run(name: str, seconds: float, options: argparse.Namespace) -> bool:
    """Runs a section in a separate process; False if it failed."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--section", name]
    command += ["--output", str(options.output), *(["--dry"] if options.dry else [])]
    before = options.output.read_text().count("\n") if options.output.exists() else 0
    error = None
    if seconds <= 0:
        error = "no time was left"
    else:
        # A new session, so that its children end with it.
        process = subprocess.Popen(command, start_new_session=True)
        try:
            code = process.wait(seconds)
            error = f"exit code {code}" if code else None
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            error = f"it took longer than {seconds:.0f} seconds"
    if error is not None:
        line = json.dumps({"section": name, "name": "section", "error": error})
        print(line, flush=True)
        with options.output.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    lines = options.output.read_text().splitlines()[before:]
    return bool(lines) and not any("error" in json.loads(line) for line in lines)


def measure(name: str, output: Path, *, dry: bool) -> None:
    """Runs a section in this process."""
    import torch

    from benchmarks.gpu import card, head, step
    from benchmarks.gpu.figures import Figures
    from benchmarks.gpu.tasks import TASKS

    figures = Figures(name, output)
    device = torch.device("cpu" if dry else "cuda")
    if dry:
        torch.compiler.set_stance("force_eager")
    if name == "card":
        card.measure(figures, device, dry=dry)
    elif name == "head":
        head.measure(figures, device, dry=dry)
    elif name == "sampling":
        from benchmarks.gpu import sampling

        sampling.measure(figures, device, dry=dry)
    else:
        step.measure(figures, device, TASKS[name], dry=dry)


if __name__ == "__main__":
    main()
