"""The verdict on the quickstart's claims, and the exit code that follows from it."""

from __future__ import annotations

import sys

import pytest

from benchmarks import quickstart_seeds
from benchmarks.quickstart_seeds import Result

BASE, BEST = 0.2, 0.9


def results(geb_reward: float, geb_share: float, fdpo_share: float) -> list[Result]:
    """Two seeds; the second is as given, the first as it should be."""
    return [
        Result("GEB", 0, [BASE, BEST], [0.01, BEST]),
        Result("f-DPO", 0, [BASE, BEST], [0.01, 0.1]),
        Result("GEB", 1, [BASE, 0.95, geb_reward], [0.01, 0.5, geb_share]),
        Result("f-DPO", 1, [BASE, 0.95, BEST], [0.01, 0.5, fdpo_share]),
    ]


@pytest.mark.parametrize(
    ("geb_reward", "geb_share", "fdpo_share", "counts", "code"),
    [
        (BEST, BEST, 0.1, (2, 2), 0),
        (BASE, BEST, 0.1, (1, 2), 1),
        (BEST, 0.1, 0.1, (2, 1), 1),
        (BEST, 0.1, BEST, (2, 1), 1),
    ],
    ids=["both", "no better than the base", "as many as f-DPO", "fewer than f-DPO"],
)
def test_the_exit_code_says_whether_both_claims_hold_in_every_seed(
    monkeypatch, capsys, geb_reward, geb_share, fdpo_share, counts, code
):
    made = results(geb_reward, geb_share, fdpo_share)
    kept = {(each.method, each.seed): each for each in made}
    monkeypatch.setattr(quickstart_seeds, "run", lambda method, seed, *_: kept[method, seed])
    monkeypatch.setattr(sys, "argv", ["quickstart_seeds", "--seeds", "0", "1"])
    with pytest.raises(SystemExit) as ended:
        quickstart_seeds.main()
    assert ended.value.code == code
    said = capsys.readouterr().out
    assert f"in {counts[0]} of 2 seeds" in said
    assert said.rstrip().endswith(f"f-DPO's in {counts[1]} of 2.")
