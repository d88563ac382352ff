"""Lines that a run prints without a terminal."""

import errno
import io
import os
import re

import pytest
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from flows.commands.terminal import TerminalConsole, neutral
from flows.execution import console
from flows.execution.console import ConsoleObserver
from stages.contract.events import Progress


def test_each_phase_of_a_stage_begins_with_a_line(request_, monkeypatch):
    monkeypatch.setattr(console, "_LINE_SECONDS", float("inf"))
    written = io.StringIO()
    observer = ConsoleObserver(Console(file=written, width=100), 1)
    observer.step_started(request_)
    for done, unit in ((1, "pairs"), (2, "pairs"), (0, "steps"), (1, "steps")):
        observer.stage_event(request_, Progress(done=done, total=2, unit=unit))
    noted = Progress(done=0, total=2, unit="responses", note="token 5 of 9")
    observer.stage_event(request_, noted)
    observer.step_started(request_)
    observer.stage_event(request_, Progress(done=1, total=2, unit="pairs"))
    lines = [line.split(": ", 1)[1] for line in written.getvalue().splitlines()]
    assert [" ".join(line.split()[:2]) for line in lines if "/2" in line] == [
        "1/2 pairs",
        "1/2 steps",
        "0/2 responses",
        "1/2 pairs",
    ]
    assert any(line.endswith("responses (0 %) token 5 of 9") for line in lines)


def test_a_full_disk_below_the_output_ends_no_run(request_):
    class Full(io.StringIO):
        def flush(self):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    ConsoleObserver(Console(file=Full()), 1).step_started(request_)


HOSTILE = "a\x1b]52;c;aGk=\x07b\x1b[2J\x9b1m\u202ec\rd"


def as_table(text):
    table = Table()
    table.add_column()
    table.add_row(text)
    return table


@pytest.mark.parametrize("form", [escape, Text, as_table])
def test_what_a_model_says_reaches_the_terminal_as_signs(form):
    out = io.StringIO()
    TerminalConsole(file=out, force_terminal=True, width=80).print(form(HOSTILE))
    printed = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", printed)
    assert "52;c;aGk=" in printed


def test_colours_of_a_log_are_left_out():
    assert neutral("\x1b[32mINFO\x1b[0m\tready\n") == "INFO\tready\n"
