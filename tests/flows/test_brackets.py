"""Paths with brackets, which are the terminal's markup, in what commands say."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flows import iterate
from flows.commands import cli
from flows.execution.run_record import RunRecord
from flows.pipeline.config import RunConfig
from flows.standing import server
from stages.contract.errors import GebError
from stages.store.opening import open_store
from tests.flows.loop import write_config


def test_a_run_in_a_folder_with_brackets_says_where_it_is_and_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(config: RunConfig) -> None:
        RunRecord(open_store(config.store), config.name).save_config(config)
        raise GebError("out of memory")

    def restarted(log: Path, say: Callable[[str], None]) -> None:
        say(f"Prefect's server has ended by itself (its output: {log})")

    monkeypatch.setattr(iterate, "iterate_resolved", fail)
    monkeypatch.setattr(server, "ensure_prefect_server", restarted)
    store = tmp_path / "[/old]" / "store"
    config = write_config(tmp_path)
    monkeypatch.setattr(sys, "argv", ["geb", "run", str(config), "--store", str(store)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr()
    assert ended.value.code == 1, said.err
    assert f"to compute; store {store}" in said.out
    assert f"(its output: {store}/runs/" in said.out
    assert f"--store '{store}'" in said.out


def test_a_home_with_brackets_of_which_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "[/old]"
    monkeypatch.setattr(sys, "argv", ["geb", "down", "--home", str(home)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    assert f"nothing of {home} is running" in capsys.readouterr().out
