"""A sweep's comparison: its combinations over seeds, tested one against another."""

import io
import re
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from uuid import UUID

import pytest
from prefect.states import Cancelling, Running
from rich.console import Console
from scipy import stats

from flows.execution import cancellation
from flows.execution.console import ConsoleObserver
from flows.execution.observer import Session
from flows.pipeline.config import RunConfig
from flows.report.comparison import compare_summaries
from flows.report.summary import Summary
from flows.report.table import FigureRow, FittedTable
from flows.sweep import run_all, sweep
from stages.contract.errors import GebError, RunCancelledError, StoppedError, UserError
from stages.evaluate.statistics import Estimate
from tests.flows.loop import ROOT

ONE, TWO = [0.5, 0.6, 0.55], [0.9, 0.8, 0.85]


def swept(first, second, figure="mean_reward", later=0):
    """A comparison of two combinations whose runs have one figure each.

    The seeds of both begin with 0; the second's begin with ``later``.
    """
    runs, labels = [], {}
    for label, values, begin in (("train.kappa=0.5", first, 0), ("train.kappa=1.0", second, later)):
        for seed, value in enumerate(values, begin):
            figures = {"mean_reward": Estimate(0.0), figure: Estimate(value)}
            rows = [FigureRow(0, figures), FigureRow(1, dict(figures))]
            name = f"{label}-s{seed}"
            runs.append(Summary(name, RunConfig(seed=seed), "s", rows=rows))
            labels[name] = label
    return compare_summaries(runs, labels)


def test_runs_of_one_seed_are_tested_by_their_differences():
    # Differences 0.06, 0.02, 0.04: mean 0.04, s = 0.02, t = 0.04 / (0.02 / √3) = 3.46, ν = 2,
    # so p = 0.0742; half an interval is 4.3027 · 0.02 / √3 = 0.0497.
    first, second = [0.2, 0.5, 0.8], [0.26, 0.52, 0.84]
    [paired] = swept(first, second).differences
    assert paired.test == "paired"
    assert paired.estimate.value == pytest.approx(0.04)
    assert paired.estimate.p_value == pytest.approx(0.0742, abs=5e-5)
    assert paired.estimate.interval == pytest.approx((-0.0097, 0.0897), abs=5e-5)
    assert paired.estimate.p_value == pytest.approx(stats.ttest_rel(second, first).pvalue)
    # The spread of the seeds hides the same difference from Welch's test.
    [other] = swept(first, second, later=1).differences
    assert other.test == "Welch"
    assert other.estimate.p_value == pytest.approx(0.88, abs=0.005)
    [uneven] = swept(first, second[:2]).differences
    assert uneven.test == "Welch", "a run of a sweep failed"
    [same] = swept(first, first).differences
    assert same.estimate.p_value is None, "differences that do not vary are not tested"


def test_combinations_are_tested_against_the_first_by_seed_and_holm():
    comparison = swept(ONE, TWO)
    [test] = comparison.differences
    assert test.name == "train.kappa=1.0"
    assert test.estimate.p_value == test.adjusted_p_value
    better = "against train.kappa=0.5: train.kappa=1.0 is better, +0.300 [+0.052"
    assert better in comparison.verdict()
    _, _, tests = comparison.tables()
    [row] = tests.records()
    assert row["difference"].startswith("+0.300 [+0.052")
    assert row["p"] == row["p by Holm"] == "p = 0.035"
    assert swept([0.5], [0.9]).over_seeds == [], "one seed: runs are compared by prompt"


def test_a_sweep_shows_which_run_is_at_work_and_since_when(monkeypatch):
    def refused(config):
        raise GebError("no")

    monkeypatch.setattr("flows.sweep.resolve_run", refused)
    written = io.StringIO()
    session = Session([ConsoleObserver(Console(file=written, width=80))])
    run_all([RunConfig(name=name) for name in ("one", "two")], 1, session)
    lines = re.findall(r"^ +\d+\.\d s (.*)$", written.getvalue(), re.MULTILINE)
    assert lines == ["one run 1 of 2", "two run 2 of 2"]


def test_the_flow_checks_every_cell_before_the_first_run(monkeypatch):
    oracle = ROOT / "data/quickstart/oracle.py"
    monkeypatch.setattr("flows.sweep.sweep_cells", lambda *given: pytest.fail("a run started"))
    with pytest.raises(UserError, match=r"^inputs\.oracle_code=/typo\.py: no such file"):
        sweep.fn.__wrapped__(grid=[f"inputs.oracle_code={oracle},/typo.py"])


def test_an_interrupt_starts_no_further_cell(monkeypatch):
    started = []

    def interrupted(config):
        started.append(config.seed)
        raise KeyboardInterrupt

    monkeypatch.setattr("flows.sweep.resolve_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_all([RunConfig(seed=seed) for seed in range(3)], 1, Session())
    assert started == [0]


class Prefect:
    """A run of a sweep that was cancelled, in Prefect."""

    id, parent_flow_run_id, root_flow_run_id = (str(UUID(int=number)) for number in (3, 2, 1))

    def read_flow_runs(self, flow_run_filter):
        ids = flow_run_filter.id.any_ or []
        return [
            SimpleNamespace(state_type=(Cancelling() if run == UUID(int=1) else Running()).type)
            for run in ids
        ]


def test_a_run_hears_of_the_cancellation_of_its_sweep(monkeypatch):
    monkeypatch.setattr(cancellation, "present", Prefect())
    monkeypatch.setattr(cancellation, "get_client", lambda sync_client: nullcontext(Prefect()))
    monkeypatch.setattr(cancellation, "_POLL_SECONDS", 0)
    stopped = threading.Event()
    states = []

    def stop(state):
        states.append(state)
        stopped.set()

    with (
        pytest.raises(RunCancelledError, match="it was cancelled in Prefect"),
        cancellation.stops_when_cancelled(stop, threading.Event(), "it"),
    ):
        assert stopped.wait(60)
        raise StoppedError("its step was stopped")
    assert states == ["cancelled"]


def shown(width):
    printed = io.StringIO()
    console = Console(width=width, file=printed, soft_wrap=True)
    comparison = swept(ONE, TWO)
    for run in comparison.runs:
        run.rows[-1].figures["distinct_4"] = Estimate(0.5)
    console.print(compare_summaries(comparison.runs, comparison.methods).tables()[0])
    return printed.getvalue()


def test_a_narrow_terminal_has_the_other_columns_below():
    wide, narrow = shown(300), shown(40)
    assert max(map(len, narrow.splitlines())) <= 40
    assert set(narrow.split()) == set(wide.split())
    assert narrow.count("train.kappa=0.5") == 2, "each part names its rows"
    assert "no room for" not in narrow, "three parts at most"
    assert "…" not in narrow + shown(15), "a cell is folded, not cut"


def test_a_table_of_many_parts_names_the_columns_that_it_leaves_out():
    printed = io.StringIO()
    header = ["run", *(f"figure-{number}" for number in range(5))]
    table = FittedTable("", header, [["one", *"12345"]], left=1)
    Console(width=16, file=printed).print(table)
    headers = re.findall("^run +(figure-.)", printed.getvalue(), re.MULTILINE)
    assert headers == ["figure-0", "figure-1", "figure-2"]
    assert "no room for: figure-3, figure-4" in " ".join(printed.getvalue().split())


def test_a_row_has_student_s_interval_which_ends_where_shares_do():
    rates = [1.0, 0.8, 1.0]
    # t(0.975, 2) = 4.303, so 0.933 ± 4.303 · 0.115 / √3; a reward may be above 1.
    reward = swept(rates, [0.0, 0.1, 0.0])
    assert reward.tables()[0].records()[0]["mean reward"] == "0.933 ± 0.12 [0.646, 1.220]"
    rate = swept(rates, [0.0, 0.1, 0.0], "win_rate")
    first, second = rate.tables()[0].records()
    assert first["seeds"] == "3"
    assert first["win rate"] == "0.933 ± 0.12 [0.646, 1.000]"
    divergence = swept([0.1, 0.4], [2.0, 2.1], "kl_to_base")
    assert divergence.tables()[0].records()[0]["KL"] == "0.25 ± 0.21 [0.00, 2.16]"
    assert second["win rate"].endswith(" [0.000, 0.177]")
    [reward_test] = [test.estimate for test in reward.differences]
    [rate_test] = [test.estimate for test in rate.differences if test.figure == "win_rate"]
    assert reward_test.low is not None and reward_test.low < -1.0
    assert rate_test.low == -1.0
    assert rate_test.p_value == reward_test.p_value


def test_a_document_has_the_figures_of_combinations_and_runs():
    document = swept(ONE, TWO).to_json()
    first, second = document["over_seeds"]
    assert first["method"] == "train.kappa=0.5"
    assert (first["figure"], first["values"]) == ("mean_reward", ONE)
    assert first["mean"]["value"] == pytest.approx(0.55)
    assert first["mean"]["low"] == pytest.approx(0.4258, abs=1e-4)
    assert second["mean"]["high"] == pytest.approx(0.9742, abs=1e-4)
    rows = [run["held-out prompts"]["figures"] for run in document["figures"].values()]
    assert [figures["mean_reward"]["value"] for figures in rows] == ONE + TWO
    assert list(document["seeds"].values()) == [0, 1, 2] * 2
    assert document["methods"]["train.kappa=1.0-s2"] == "train.kappa=1.0"
