"""The message of a run of which several steps failed."""

from __future__ import annotations

from flows.execution.prefect_tasks import with_others
from stages.contract.errors import (
    DamagedRecordError,
    PreemptedError,
    StageFailedError,
    UserError,
)


def test_the_first_failure_names_the_others_and_keeps_its_lines() -> None:
    error = with_others(StageFailedError("a: boom; log: a.log", ("one", "two")), ["b", "c"])
    assert str(error) == "a: boom; log: a.log; also failed: b, c"
    assert isinstance(error, StageFailedError)
    assert error.last_lines == ("one", "two")


def test_a_single_failure_is_passed_on_as_it_is() -> None:
    error = StageFailedError("a: boom")
    assert with_others(error, []) is error


def test_an_error_stays_what_it_is() -> None:
    error = with_others(UserError("a: no such file", "name another"), ["b"])
    assert isinstance(error, UserError)
    assert (error.message, error.remedy) == ("a: no such file; also failed: b", "name another")
    taken = with_others(PreemptedError("a: the node is gone", ("one",)), ["b"])
    assert isinstance(taken, PreemptedError)
    assert str(taken) == "a: the node is gone; also failed: b"
    assert taken.last_lines == ("one",)
    damaged = with_others(DamagedRecordError("record: empty", "remove it"), ["b"])
    assert isinstance(damaged, DamagedRecordError)
    assert damaged.remedy == "remove it"
