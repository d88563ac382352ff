"""The lease's protocol, in every interleaving of takers, dying holders and onlookers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from stages.contract import file_lease
from stages.contract.file_lease import FileLease
from stages.contract.file_locks import is_held
from tests.interleaving import Actor, explore, pause


class TwoHoldersError(AssertionError):
    """Two processes hold one lease."""


class World:
    """A lease that a killed holder left, those who want it, and those who look at it."""

    def __init__(self, path: Path, kind: type[FileLease]) -> None:
        self.path = path
        self.kind = kind
        self.holders: list[str] = []
        self.taken = 0
        left = kind(path)
        assert left._try_acquire() is None
        left._alive.free()

    def taker(self, name: str, *, dies: bool, tries: int = 2) -> Actor:
        def take() -> None:
            lease = self.kind(self.path)
            for _ in range(tries):
                if lease._try_acquire() is None:
                    break
            else:
                return
            self.taken += 1
            self.holders.append(name)
            if len(self.holders) > 1:
                raise TwoHoldersError(self.holders)
            pause()
            self.holders.remove(name)
            if dies:
                # As the kernel does for a killed process: the record stays.
                lease._alive.free()
            else:
                lease._give_back()

        return take

    def onlooker(self) -> Actor:
        return lambda: [self.kind(self.path).holder() for _ in range(2)] and None


class LeaseAsItWas(FileLease):
    """The protocol's first form: looks outside the guard, and takes whatever the lock says."""

    def holder(self):
        with self._guard():
            record = self._read()
        return record if record is not None and self._is_alive(record) else None

    def _try_acquire(self):
        with self._guard():
            record = self._read()
            if record is not None and record["owner"] != self._owner and self._is_alive(record):
                return record
            self._alive.take()
            self._write()
        return None


class LeaseWithoutGuard(FileLease):
    """Takes the lease in steps between which others may come."""

    def _try_acquire(self):
        record = self._read()
        pause()
        if record is not None and is_held(self._alive_path):
            return record
        self._alive.take()
        self._write()
        return None


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[type[FileLease]], World]:
    # One read of the kernel's file for all.
    machine = file_lease._machine()
    monkeypatch.setattr(file_lease, "_machine", lambda: machine)
    numbers = itertools.count()
    return lambda kind: World(tmp_path / str(next(numbers)) / "key", kind)


Cast = Callable[[World], list[Actor]]
CASTS: dict[str, tuple[Cast, int]] = {
    "two takers and an onlooker": (
        lambda world: [
            world.taker("a", dies=False),
            world.taker("b", dies=False),
            world.onlooker(),
        ],
        2,
    ),
    "holders that die": (
        lambda world: [world.taker("a", dies=True), world.taker("b", dies=True), world.onlooker()],
        2,
    ),
    "one dies, one gives back": (
        lambda world: [world.taker("a", dies=True), world.taker("b", dies=False, tries=3)],
        4,
    ),
}


@pytest.mark.parametrize("name", CASTS)
def test_no_interleaving_lets_two_hold_the_lease(world, name: str) -> None:
    cast, most_switches = CASTS[name]
    worlds: list[World] = []

    def actors() -> list[Actor]:
        worlds.append(world(FileLease))
        return cast(worlds[-1])

    count = explore(actors, most_switches=most_switches)
    assert count == len(worlds) > 50
    # Some came too early, and some order lets both have it, one after the other.
    assert {each.taken for each in worlds} >= {1, 2}
    assert all(each.kind(each.path).holder() is None for each in worlds)


def test_the_old_protocol_is_found_out(world) -> None:
    cast, most_switches = CASTS["two takers and an onlooker"]
    with pytest.raises(TwoHoldersError):
        explore(lambda: cast(world(LeaseAsItWas)), most_switches=most_switches)


def test_a_protocol_without_the_guard_is_found_out(world) -> None:
    cast, most_switches = CASTS["one dies, one gives back"]
    with pytest.raises(TwoHoldersError):
        explore(lambda: cast(world(LeaseWithoutGuard)), most_switches=most_switches)
