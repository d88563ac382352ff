"""Engine that a program keeps from one request for the next."""

from __future__ import annotations

import pytest

from stages.contract.context import KeptEngine


class Engine:
    def __init__(self, log: list[str], name: str) -> None:
        self._log = log
        self._name = name
        log.append(f"load {name}")

    def close(self) -> None:
        self._log.append(f"close {self._name}")


def use(kept: KeptEngine, log: list[str], name: str, *, again: bool = True) -> None:
    kept.is_wanted_again = again
    with kept.use(name, lambda: Engine(log, name)):
        log.append(f"use {name}")


def test_the_same_engine_serves_until_no_request_follows() -> None:
    kept, log = KeptEngine(), []
    use(kept, log, "a")
    use(kept, log, "a")
    use(kept, log, "a", again=False)
    assert log == ["load a", "use a", "use a", "use a", "close a"]


def test_another_engine_is_loaded_once_the_first_is_closed() -> None:
    kept, log = KeptEngine(), []
    use(kept, log, "a")
    use(kept, log, "b", again=False)
    assert log == ["load a", "use a", "close a", "load b", "use b", "close b"]


def test_an_error_closes_it_and_the_next_request_loads_it_anew() -> None:
    kept, log = KeptEngine(), []
    kept.is_wanted_again = True
    with pytest.raises(RuntimeError), kept.use("a", lambda: Engine(log, "a")):
        raise RuntimeError("broke down")
    use(kept, log, "a", again=False)
    assert log == ["load a", "close a", "load a", "use a", "close a"]


def test_one_that_was_not_used_again_is_closed_at_the_end() -> None:
    kept, log = KeptEngine(), []
    use(kept, log, "a")
    kept.close()
    kept.close()
    assert log == ["load a", "use a", "close a"]
