"""The circuit breaker of servers, without a server."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from stages.remote.client import FAILURES_TO_OPEN, CircuitBreaker


def test_a_late_failure_of_another_request_is_not_the_probe_s() -> None:
    breaker = CircuitBreaker(pause_seconds=0.0, max_probes=1)
    for _ in range(FAILURES_TO_OPEN):
        breaker.failed("down")
    assert breaker.enter(), "the probe"
    with ThreadPoolExecutor(1) as others:
        others.submit(breaker.failed, "sent before the circuit opened").result()
        waiting = others.submit(breaker.enter)
        with pytest.raises(TimeoutError):
            waiting.result(0.2)
        breaker.succeeded()
        assert waiting.result()
