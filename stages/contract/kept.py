"""Engine that a program keeps from one of its requests for the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar


class Closing(Protocol):
    """Anything that is closed once it is not needed any more."""

    def close(self) -> None:
        """Frees memory and devices, and ends processes."""
        ...


T = TypeVar("T", bound=Closing)


class KeptEngine:
    """The engine that the requests of one program share; there is at most one at a time.

    Attributes:
        is_wanted_again: True where further requests follow the present one.
    """

    def __init__(self) -> None:
        self.is_wanted_again = False
        self._identity: Any = None
        self._engine: Any = None

    @contextmanager
    def use(self, identity: Any, load: Callable[[], T]) -> Iterator[T]:
        """An engine for the block: the one that was kept, or a new one.

        It is closed at the end of the block if an error ends that or no further request follows.

        Args:
            identity: All that the engine depends on. One with another identity is closed first.
            load: Starts an engine.
        """
        if self._engine is not None and self._identity != identity:
            self.close()
        if self._engine is None:
            self._engine, self._identity = load(), identity
        try:
            yield self._engine
        except BaseException:
            self.close()
            raise
        if not self.is_wanted_again:
            self.close()

    def close(self) -> None:
        """Closes the engine, if there is one."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()
