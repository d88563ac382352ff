"""Outcomes of a campaign of faults: what a file of them keeps, and how they are counted."""

from dataclasses import replace

from benchmarks.chaos.outcome import TOO_LATE, Outcome, append, read, table

GOOD = Outcome(
    seed=0,
    run=0,
    setting="process, bucket",
    steps=3,
    faults=("bucket cut: at 3 s for 2 s", f"kill: at 9 s{TOO_LATE}"),
    attempts=2,
    seconds=31.5,
    identical=True,
    orphans=0,
    tracebacks=0,
)
BAD = replace(GOOD, run=1, setting="process, folder", faults=("kill: at 2 s stage",), orphans=1)


def test_a_campaign_goes_on_after_the_last_whole_line(tmp_path):
    path = tmp_path / "chaos.jsonl"
    assert read(path) == []
    append(path, GOOD)
    append(path, BAD)
    whole = path.read_text()
    path.write_text(whole[:-10])
    assert read(path) == [GOOD]
    append(path, BAD)
    assert read(path) == [GOOD, BAD]


def test_the_tables_count_by_seed_kind_and_fault():
    assert [GOOD.is_good, BAD.is_good] == [True, False]
    rows = table([GOOD, BAD]).splitlines()
    assert "| 0 | 2 | 2 | 4 | 2 | 1 | 0 |" in rows
    assert "| process, folder | 1 | 1 | 2 | 1 | 1 | 0 |" in rows
    assert "| kill | 1 | 1 | 2 | 1 | 1 | 0 |" in rows
    assert "| bucket cut | 1 | 1 | 2 | 1 | 0 | 0 |" in rows
