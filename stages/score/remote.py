"""Requests to a server that scores: several at once, retried, and held back while it is down."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import httpx

from stages.contract.errors import GebError, UserError
from stages.score.breaker import CircuitBreaker
from stages.score.params import ScoreParams

T = TypeVar("T")
_TOO_MANY_REQUESTS = 429
# A server that asks for a longer wait than this is as good as down.
_LONGEST_WAIT_SECONDS = 60.0


class RemoteError(GebError):
    """The server did not answer, however often it was asked; a later attempt may find it well."""


class Remote:
    """A server that takes JSON by POST.

    Threads send and the main thread waits, so that SIGTERM ends the stage at once.

    Args:
        url: Where to post.
        params: Time limit, attempts, waits and requests at once.

    Raises:
        UserError: The environment variable that shall hold the key is not set.
    """

    def __init__(self, url: str, params: ScoreParams) -> None:
        self.url = url
        self._params = params
        self._headers = _authorization(params.remote_key_env)

    def post_all(self, payloads: Sequence[Any], read: Callable[[bytes], T]) -> list[T]:
        """Posts the payloads and returns what ``read`` makes of the answers, in order.

        Args:
            payloads: JSON values, one per request.
            read: An answer's body to its value; raises UserError if it is not what was agreed.

        Raises:
            RemoteError: The server cannot be reached, or fails again and again.
            UserError: The server refuses a request, or ``read`` its answer.
        """
        params = self._params
        breaker = CircuitBreaker(params.remote_wait_seconds, params.remote_attempts)
        stopped = threading.Event()
        pool = ThreadPoolExecutor(params.concurrency, thread_name_prefix="remote")
        limits = httpx.Limits(max_connections=params.concurrency)
        timeout = params.remote_timeout_seconds
        with httpx.Client(headers=self._headers, timeout=timeout, limits=limits) as client:

            def send(payload: Any) -> T:
                return read(self._post(client, payload, breaker, stopped))

            try:
                sent = [pool.submit(send, payload) for payload in payloads]
                wait(sent, return_when=FIRST_EXCEPTION)
                # The error itself, not a request that ended because of it.
                failed = [each for each in sent if each.done() and each.exception() is not None]
                for each in failed:
                    each.result()
                return [each.result() for each in sent]
            finally:
                stopped.set()
                breaker.close()
                pool.shutdown(wait=False, cancel_futures=True)

    def _post(
        self,
        client: httpx.Client,
        payload: Any,
        breaker: CircuitBreaker,
        stopped: threading.Event,
    ) -> bytes:
        for attempt in range(self._params.remote_attempts):
            if not breaker.enter():
                break
            wait_seconds = self._params.remote_wait_seconds * 2**attempt
            try:
                response = client.post(self.url, json=payload)
            except httpx.TransportError as error:
                reason = f"{type(error).__name__}: {error}"
            else:
                if not _is_passing(response.status_code):
                    breaker.succeeded()
                    return self._accepted(response)
                reason = f"status {response.status_code}: {_start(response.content)}"
                wait_seconds = max(wait_seconds, _retry_after(response))
            breaker.failed(reason)
            if attempt + 1 < self._params.remote_attempts:
                stopped.wait(min(wait_seconds, _LONGEST_WAIT_SECONDS))
        raise RemoteError(f"{self.url} cannot score; its last failure: {breaker.last_failure}")

    def _accepted(self, response: httpx.Response) -> bytes:
        if response.status_code in (401, 403):
            name = self._params.remote_key_env
            raise UserError(
                f"{self.url} refuses the key (status {response.status_code})",
                f"check the environment variable {name}"
                if name
                else "set score.remote_key_env to the name of the variable that holds the key",
            )
        if not response.is_success:
            raise UserError(
                f"{self.url} refuses a request with status {response.status_code}: "
                f"{_start(response.content)}",
                "check score.remote_url and what the server serves there",
            )
        return response.content


def not_agreed(url: str, body: bytes, what: str) -> UserError:
    """The error of an answer that is not what was agreed."""
    return UserError(
        f"the answer of {url} is not what was agreed: {what}; it begins {_start(body)}",
        "mend the server; docs/oracles.md has the schema",
    )


def _is_passing(status: int) -> bool:
    """Whether a retry may cure what the status tells."""
    return status == _TOO_MANY_REQUESTS or status >= 500


def _retry_after(response: httpx.Response) -> float:
    """Seconds that the server asks to wait; 0 if it says nothing or names a date."""
    text = response.headers.get("retry-after", "")
    return float(text) if text.isdecimal() else 0.0


def _authorization(name: str | None) -> dict[str, str]:
    if name is None:
        return {}
    if not os.environ.get(name):
        raise UserError(
            f"score.remote_key_env is {name}, and that environment variable is not set",
            f"export {name} where the score stage runs",
        )
    return {"Authorization": f"Bearer {os.environ[name]}"}


def _start(body: bytes) -> str:
    return repr(body[:200].decode(errors="replace"))
