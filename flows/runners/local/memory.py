"""Kills for want of memory: the kernel's count of them, before a stage and after it."""

from __future__ import annotations

import re
from pathlib import Path

_GIB = 2**30
_ROOT = Path("/sys/fs/cgroup")
_PROC = Path("/proc")


class MemoryWatch:
    """Count of the processes that the kernel has killed where this one's memory is limited.

    Memory is limited by the innermost control group that counts its kills (version 2, or 1), or
    else by the machine.

    Args:
        root: Mount point of the control groups.
        proc: Mount point of the kernel's processes.
    """

    def __init__(self, root: Path = _ROOT, proc: Path = _PROC) -> None:
        self._counter, self._limit = _files(root, proc)
        self._before = _count(self._counter)

    def verdict(self) -> str:
        """Words on a stage that SIGKILL ended since this object was made."""
        now, limit = _count(self._counter), _bytes(self._limit)
        if now is None or self._before is None:
            return ""
        of = f" of {limit / _GIB:.1f} GiB" if limit is not None else ""
        if now > self._before:
            return f"the memory{of} ran out, and the kernel killed a process"
        return f"not for want of memory: the limit{of} was not reached"


def _files(root: Path, proc: Path) -> tuple[Path, Path]:
    """The file that counts kills, and the one with the limit."""
    try:
        groups = (proc / "self/cgroup").read_text()
    except OSError:
        groups = ""
    # `0::/path` of version 2, `4:memory:/path` of version 1.
    for mount, controller, counter, limit in (
        (root, "", "memory.events", "memory.max"),
        (root / "memory", "memory", "memory.oom_control", "memory.limit_in_bytes"),
    ):
        for path in re.findall(rf"^\d+:{controller}:/(.*)$", groups, re.MULTILINE):
            # In a container the path may be the host's.
            for folder in (mount / path, mount):
                if _count(folder / counter) is not None:
                    return folder / counter, folder / limit
    return proc / "vmstat", proc / "meminfo"


def _count(path: Path) -> int | None:
    found = re.search(r"^oom_kill (\d+)$", _text(path), re.MULTILINE)
    return int(found[1]) if found else None


def _bytes(path: Path) -> int | None:
    text = _text(path)
    if found := re.match(r"MemTotal:\s+(\d+) kB", text):
        return int(found[1]) * 1024
    # `max`, or in version 1 a number beyond any memory, where there is no limit.
    limit = int(text) if text.strip().isdecimal() else None
    return limit if limit is not None and limit < 2**60 else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
