"""Stages killed for want of memory, told by the kernel's counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.runners.base import FailureTail
from flows.runners.local.memory import MemoryWatch
from stages.contract.errors import StageFailedError
from stages.contract.request import make_request
from tests.probe_stage import ProbeParams

SECOND = ("0::/jobs/one", "jobs/one/memory.events", "jobs/one/memory.max")
FIRST = (
    *("4:memory:/jobs/one\n0::/",),
    *("memory/jobs/one/memory.oom_control", "memory/jobs/one/memory.limit_in_bytes"),
)
IN_A_CONTAINER = ("0::/docker/abc", "memory.events", "memory.max")


class Machine:
    """A tree of control groups whose kernel counts kills."""

    def __init__(self, root: Path, groups: str, counter: str, limit: str) -> None:
        self.root, self.proc = root / "cgroup", root / "proc"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "self/cgroup").write_text(groups)
        (self.proc / "vmstat").write_text("oom_kill 0\n")
        (self.proc / "meminfo").write_text("MemTotal:       16777216 kB\n")
        self.counter = self.root / counter
        self.counter.parent.mkdir(parents=True, exist_ok=True)
        self.counter.write_text("low 0\noom_kill 7\n")
        (self.root / limit).write_text(f"{3 * 2**30}\n")

    def watch(self) -> MemoryWatch:
        return MemoryWatch(self.root, self.proc)


@pytest.mark.parametrize("layout", [SECOND, FIRST, IN_A_CONTAINER])
def test_a_kill_that_the_kernel_counts_is_one_for_want_of_memory(
    tmp_path: Path, layout: tuple[str, str, str]
) -> None:
    machine = Machine(tmp_path, *layout)
    watch = machine.watch()
    assert watch.verdict() == "not for want of memory: the limit of 3.0 GiB was not reached"
    machine.counter.write_text("low 0\noom_kill 8\n")
    assert watch.verdict() == "the memory of 3.0 GiB ran out, and the kernel killed a process"


def test_without_a_control_group_the_machine_s_memory_counts(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "", "elsewhere/memory.events", "elsewhere/memory.max")
    watch = machine.watch()
    (machine.proc / "vmstat").write_text("oom_kill 1\n")
    assert "of 16.0 GiB ran out" in watch.verdict()


def test_an_unlimited_group_has_no_number(tmp_path: Path) -> None:
    machine = Machine(tmp_path, *SECOND)
    (machine.root / "jobs/one/memory.max").write_text("max\n")
    assert machine.watch().verdict() == "not for want of memory: the limit was not reached"


def test_a_kernel_that_counts_nothing_says_nothing(tmp_path: Path) -> None:
    assert MemoryWatch(tmp_path, tmp_path).verdict() == ""


def test_bars_of_progress_are_no_last_words(tmp_path: Path) -> None:
    request = make_request(ProbeParams(), inputs={}, seed=0, store=str(tmp_path))
    tail = FailureTail()
    for line in ("loading weights", " 45%|████▌     | 9/20 [00:03<00:04,  2.7it/s]"):
        tail.add_line(line)
    with pytest.raises(StageFailedError, match=r"ended by SIGKILL \(seen\): loading weights; log"):
        tail.raise_for(137, request, stopped=False, log="x.log", of_memory=lambda: "seen")
