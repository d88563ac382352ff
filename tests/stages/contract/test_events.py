import io

import pytest

from stages.contract import events as events_module
from stages.contract.events import Emitter, Failure, Log, Metric, Progress, parse_event


@pytest.mark.parametrize(
    "event",
    [
        Progress(done=1, total=2, unit="rows", note="n"),
        Metric(step=3, values={"loss": 0.5}),
        Metric(step=3, values={"loss": 0.5, "ratio": float("inf")}),
        Log(level="warning", message="careful\nnow"),
        Failure(kind="user", message="bad", remedy="good"),
    ],
)
def test_events_survive_their_line(event):
    stream = io.StringIO()
    Emitter(stream).emit(event)
    (line,) = stream.getvalue().splitlines()
    assert parse_event(line) == event


@pytest.mark.parametrize("line", ["", "loading weights", "{}", '{"type": "unknown"}', "[1]", "3"])
def test_other_lines_are_no_events(line):
    assert parse_event(line) is None


def test_progress_is_rare_but_never_misses_the_end(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(events_module.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    emitter = Emitter(stream)
    for done in range(11):
        emitter.progress(done, 10, "rows")
        now[0] += 0.2
    reported = [parse_event(line).done for line in stream.getvalue().splitlines()]
    assert reported == [0, 3, 6, 9, 10]


def test_an_endless_message_is_cut():
    message = Failure(kind="crash", message="begin" + "x" * 5_000_000 + "end").message
    assert len(message) < 21_000
    assert message.startswith("begin")


def test_half_a_surrogate_pair_is_escaped():
    stream = io.StringIO()
    Emitter(stream).info("file \udce9.txt")
    assert parse_event(stream.getvalue()) == Log(message="file \\udce9.txt")


def test_control_characters_of_a_message_are_spelled_out():
    line = '{"type": "failure", "kind": "user", "message": "x\\u0000y\\u001b[2J\\u2028z\\n\\tend"}'
    assert parse_event(line) == Failure(kind="user", message="x\\x00y\\x1b[2J\\u2028z\n\tend")
