"""Fixtures of several flow tests: a `geb up`, and a finished run to change."""

import shutil
import sys

import pytest

from flows.commands import cli
from tests.flows.loop import write_config
from tests.flows.standing.standing import geb_up
from tests.probe_stage import probe_request


@pytest.fixture(scope="module")
def standing(tmp_path_factory):
    """A `geb up` at work, with a server, a worker and a store."""
    with geb_up(tmp_path_factory.mktemp("up")) as (_, up):
        yield up


@pytest.fixture
def copied(finished, tmp_path):
    """A finished run whose store the test may change; modification times are kept."""
    shutil.copytree(finished.parent, tmp_path / "run", copy_function=shutil.copy2)
    return write_config(tmp_path / "run")


@pytest.fixture
def request_(store):
    """A request for one probe."""
    return probe_request(store)


@pytest.fixture
def geb_here(monkeypatch, capsys):
    """Runs `geb` in this process: its exit code, and what it says, with one space between words."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["geb", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        return int(ended.value.code or 0), " ".join((printed.out + printed.err).split())

    return run
