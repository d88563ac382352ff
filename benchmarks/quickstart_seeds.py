"""Does the bonus explore? The quickstart with and without it, over several seeds.

    python -m benchmarks.quickstart_seeds --seeds 0 1 2 3 4

Each seed makes its own warm start, which both methods then begin from. The table shows, on the
held-out prompts, the mean reward of the base policy and of each iteration's, and the share of
answers that open with the best word. ``--set`` changes both methods alike
(``--set train.learning_rate=1e-3``). Runs are kept in the store: a second call takes seconds. The
exit code is 0 where, in every seed, GEB improves on its base policy and finds the best opening more
often than f-DPO, and 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

CONFIGS = {"GEB": "quickstart.yaml", "f-DPO": "quickstart-fdpo.yaml"}
FOLDER = Path(__file__).parents[1] / "configs"
BEST = "gladly"
"""The oracle's component that says whether an answer has the best opening."""


@dataclass(frozen=True)
class Result:
    """One run.

    Attributes:
        method: Key of ``CONFIGS``.
        seed: Seed of the run and of its warm start.
        rewards: Mean reward on the held-out prompts: of the base policy, then of each iteration's.
        best_shares: Share of answers with the best opening, in the same order.
    """

    method: str
    seed: int
    rewards: list[float]
    best_shares: list[float]


def run(method: str, seed: int, store: Path, overrides: Sequence[str]) -> Result:
    """Runs the quickstart once and reads its results."""
    config = FOLDER / CONFIGS[method]
    name = f"{config.stem}-seed-{seed}"
    settings = [f"name={name}", f"seed={seed}", f"store={store}", *overrides]
    _geb("run", str(config), *(part for each in settings for part in ("--set", each)))
    found = json.loads(_geb("report", name, "--store", str(store), "--json", captured=True))
    rows = found["rows"]
    return Result(
        method,
        seed,
        [row["mean_reward"] for row in rows],
        [row["components"][BEST] for row in rows],
    )


def _geb(*arguments: str, captured: bool = False) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "flows.commands.cli", *arguments],
        check=True,
        text=True,
        stdout=subprocess.PIPE if captured else sys.stderr,
    )
    return done.stdout or ""


def table(results: Iterable[Result]) -> str:
    """The results as a Markdown table, iterations joined by arrows."""
    lines = [
        "| seed | method | mean reward | share of the best opening |",
        "| --- | --- | --- | --- |",
    ]
    for each in results:
        rewards = " → ".join(f"{value:.3f}" for value in each.rewards)
        shares = " → ".join(f"{value:.3f}" for value in each.best_shares)
        lines.append(f"| {each.seed} | {each.method} | {rewards} | {shares} |")
    return "\n".join(lines)


@dataclass(frozen=True)
class Verdict:
    """In how many seeds each of the quickstart's two claims holds.

    Attributes:
        improved: GEB's last iteration has a higher reward than its base policy.
        explored: GEB's last iteration has a larger share of the best opening than f-DPO's.
        total: Number of seeds.
    """

    improved: int
    explored: int
    total: int

    @property
    def holds(self) -> bool:
        """True where both claims hold in every seed."""
        return self.improved == self.explored == self.total

    def __str__(self) -> str:
        return (
            "GEB's last iteration has a higher reward than its base policy in "
            f"{self.improved} of {self.total} seeds, and a larger share of the best opening than "
            f"f-DPO's in {self.explored} of {self.total}."
        )


def verdict(results: Sequence[Result]) -> Verdict:
    """Number of seeds for which the two claims of the quickstart hold."""
    by_method = {method: [each for each in results if each.method == method] for method in CONFIGS}
    return Verdict(
        improved=sum(each.rewards[-1] > each.rewards[0] for each in by_method["GEB"]),
        explored=sum(
            geb.best_shares[-1] > fdpo.best_shares[-1]
            for geb, fdpo in zip(by_method["GEB"], by_method["f-DPO"], strict=True)
        ),
        total=len(by_method["GEB"]),
    )


def main() -> None:
    """Runs both methods for each seed and prints the table; exits 1 where a claim fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    parser.add_argument("--store", type=Path, default=Path("store"))
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="NAME=VALUE"
    )
    parser.add_argument("--json", action="store_true", help="print the same as JSON")
    arguments = parser.parse_args()
    results = [
        run(method, seed, arguments.store.absolute(), arguments.overrides)
        for seed in arguments.seeds
        for method in CONFIGS
    ]
    if arguments.json:
        print(json.dumps([asdict(each) for each in results], indent=2))
    else:
        print(f"{table(results)}\n\n{verdict(results)}")
    sys.exit(0 if verdict(results).holds else 1)


if __name__ == "__main__":
    main()
