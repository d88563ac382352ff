"""Requests to a server: several at once, retried, and held back while it is down."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import httpx
from pydantic import ValidationError

from stages.contract.errors import GebError, UserError
from stages.remote.settings import ServerSettings

T = TypeVar("T")
_TOO_MANY_REQUESTS = 429
# A server that asks for a longer wait than this is as good as down.
_LONGEST_WAIT_SECONDS = 60.0
# Requests handed to the threads, for each of those that can be under way.
_QUEUED = 2


class RemoteError(GebError):
    """The server did not answer, however often it was asked; a later attempt may find it well."""


class Remote:
    """A server that takes JSON by POST.

    Threads send and the main thread waits, so that SIGTERM ends the stage at once.

    Args:
        settings: Patience, and the name of the key's environment variable.
        url: Where to post.
        section: Name of the section of the configuration that the settings are, for messages.
        check: What to look at when the server refuses a request, for messages.

    Raises:
        UserError: The address has no scheme, or the environment variable that shall hold the key is
            not set.
    """

    def __init__(self, settings: ServerSettings, *, url: str, section: str, check: str) -> None:
        if not url.startswith(("http://", "https://")):
            # It would be asked again and again, and pass for a server that is down.
            raise UserError(
                f"{section}.url is {settings.url!r}, which is no address of a server",
                "write it whole, with http:// or https:// in front",
            )
        self.url = url
        self._settings = settings
        self._key_setting = f"{section}.key_env"
        self._check = check
        self._headers = self._authorization()

    def post_each(
        self, payloads: Iterable[Any], read: Callable[[bytes], T]
    ) -> Generator[tuple[int, T], None, None]:
        """Posts payloads and yields what ``read`` makes of the answers, as they come.

        Args:
            payloads: JSON values, one per request; taken as there is room for them.
            read: An answer's body to its value; raises UserError if it is not what was agreed.

        Yields:
            (number of the payload, value). Close the iterator, or exhaust it, to end the requests.

        Raises:
            RemoteError: The server cannot be reached, or fails again and again.
            UserError: The server refuses a request, or ``read`` its answer.
        """
        settings = self._settings
        breaker = CircuitBreaker(settings.wait_seconds, settings.attempts)
        stopped = threading.Event()
        pool = ThreadPoolExecutor(settings.concurrency, thread_name_prefix="remote")
        limits = httpx.Limits(max_connections=settings.concurrency)
        timeout = settings.timeout_seconds
        waiting = enumerate(payloads)
        under_way: dict[Future[T], int] = {}
        with httpx.Client(headers=self._headers, timeout=timeout, limits=limits) as client:

            def send(payload: Any) -> T:
                return read(self._post(client, payload, breaker, stopped))

            try:
                while True:
                    while len(under_way) < _QUEUED * settings.concurrency:
                        number, payload = next(waiting, (None, None))
                        if number is None:
                            break
                        under_way[pool.submit(send, payload)] = number
                    if not under_way:
                        return
                    done, _ = wait(under_way, return_when=FIRST_COMPLETED)
                    # Answers before failures: what has been answered shall not be asked again.
                    for future in sorted(done, key=lambda each: each.exception() is not None):
                        number = under_way.pop(future)
                        yield number, future.result()
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
        for attempt in range(self._settings.attempts):
            if not breaker.enter():
                break
            wait_seconds = self._settings.wait_seconds * 2**attempt
            try:
                response = client.post(self.url, json=payload)
            except httpx.RequestError as error:
                reason = f"{type(error).__name__}: {error}"
            else:
                if not _is_passing(response.status_code):
                    breaker.succeeded()
                    return self._accepted(response)
                reason = f"status {response.status_code}: {start_of(response.content)}"
                wait_seconds = max(wait_seconds, _retry_after(response))
            breaker.failed(reason)
            if attempt + 1 < self._settings.attempts:
                stopped.wait(min(wait_seconds, _LONGEST_WAIT_SECONDS))
        raise RemoteError(f"{self.url} does not serve; its last failure: {breaker.last_failure}")

    def _accepted(self, response: httpx.Response) -> bytes:
        settings = self._settings
        if response.status_code in (401, 403):
            raise UserError(
                f"{self.url} refuses the key (status {response.status_code})",
                f"check the environment variable {settings.key_env}"
                if settings.key_env
                else f"set {self._key_setting} to the name of the variable that holds the key",
            )
        if not response.is_success:
            raise UserError(
                f"{self.url} refuses a request with status {response.status_code}: "
                f"{start_of(response.content)}",
                self._check,
            )
        return response.content

    def _authorization(self) -> dict[str, str]:
        name = self._settings.key_env
        if name is None:
            return {}
        if not os.environ.get(name):
            raise UserError(
                f"{self._key_setting} is {name}, and that environment variable is not set",
                f"export {name} where the stage runs",
            )
        return {"Authorization": f"Bearer {os.environ[name]}"}


def first_problem(error: ValidationError) -> str:
    """Place and kind of the first thing that is wrong with an answer, for messages."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'body'}: {first['msg']}"


def start_of(body: bytes) -> str:
    """The first words of an answer, for messages."""
    return repr(body[:200].decode(errors="replace"))


def _is_passing(status: int) -> bool:
    """True for a status that a retry may cure."""
    return status == _TOO_MANY_REQUESTS or status >= 500


def _retry_after(response: httpx.Response) -> float:
    """Seconds that the server asks to wait; 0 if it says nothing or names a date."""
    text = response.headers.get("retry-after", "")
    return float(text) if text.isdecimal() else 0.0


# Failures in a row, of whichever requests, that open the circuit.
FAILURES_TO_OPEN = 5


class CircuitBreaker:
    """Holds requests back while a server fails, and lets one at a time through to try it.

    After :data:`FAILURES_TO_OPEN` failures in a row the circuit is open: :meth:`enter` waits until
    the pause is over and lets one request probe. Its success closes the circuit for all; its
    failure begins a pause of twice the length. After ``max_probes`` failed probes it gives up.

    Args:
        pause_seconds: The first pause.
        max_probes: Failed probes in a row after which :meth:`enter` lets nothing through.
    """

    def __init__(self, pause_seconds: float, max_probes: int) -> None:
        self._pause_seconds = pause_seconds
        self._max_probes = max_probes
        self._changed = threading.Condition()
        self._failures = 0
        self._failed_probes = 0
        # The thread whose request probes; requests from before the circuit opened may fail late.
        self._probe: int | None = None
        self._retry_at = 0.0
        self._closed = False
        self.last_failure = "none"

    def enter(self) -> bool:
        """Waits for leave to send a request; False if the breaker has given up."""
        with self._changed:
            while not self._closed and self._failures >= FAILURES_TO_OPEN:
                if self._failed_probes >= self._max_probes:
                    return False
                pause = self._retry_at - time.monotonic()
                if pause <= 0 and self._probe is None:
                    self._probe = threading.get_ident()
                    return True
                # While another probes, its outcome is what wakes this one.
                self._changed.wait(pause if self._probe is None else None)
            return not self._closed

    def succeeded(self) -> None:
        """The server answered a request."""
        with self._changed:
            self._failures = self._failed_probes = 0
            self._probe = None
            self._changed.notify_all()

    def failed(self, reason: str) -> None:
        """The server did not answer a request, or by an error of its own."""
        with self._changed:
            self.last_failure = reason
            self._failures += 1
            if self._probe == threading.get_ident():
                self._failed_probes += 1
                self._probe = None
            if self._failures >= FAILURES_TO_OPEN:
                self._retry_at = time.monotonic() + self._pause_seconds * 2**self._failed_probes
            self._changed.notify_all()

    def close(self) -> None:
        """Lets nothing through any more, nor keeps anyone waiting."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
