"""Lines of a container's output, without an engine: chunks stand for what it sends."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flows.runners.docker import container
from stages.contract.file_locks import AliveLock


def test_a_progress_bar_is_a_line_each_time_it_is_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chunks = [b"loading\r\n 10%\r", b" 20%\r 3", b"0%\nCUDA out of memory"]
    api = SimpleNamespace(logs=lambda *_, **__: iter(chunks))
    engine = SimpleNamespace(api=api, close=lambda: None)
    monkeypatch.setattr(container, "connect", lambda: engine)
    running = container.StageContainer(engine, "c" * 64, AliveLock.__new__(AliveLock))
    assert list(running.lines("stderr")) == [
        "loading\n",
        " 10%\n",
        " 20%\n",
        " 30%\n",
        "CUDA out of memory\n",
    ]
