"""Requests to a server: several at once, each retried with growing pauses."""

import os
import threading
import time
from collections.abc import Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from stages.contract.errors import GebError, UserError
from stages.score.params import ServerSettings

Answer = TypeVar("Answer", bound=BaseModel)
_TOO_MANY_REQUESTS = 429
ATTEMPTS = 5
WAIT_SECONDS = 1.0
"""Wait before the second attempt; doubled each time."""
LARGEST_ANSWER = 64 << 20
"""Most bytes of an answer, its compression undone."""
# A server that asks for a longer wait than this is as good as down.
_LONGEST_WAIT_SECONDS = 60.0
# Requests handed to the threads, for each of those that can be under way.
_QUEUED = 2


class RemoteError(GebError):
    """The server did not answer, however often it was asked; a later attempt may find it well."""


class Remote:
    """A server that takes JSON by POST.

    Threads send and the main thread waits, so that SIGTERM ends the stage at once. Messages name
    the section of the configuration that the settings are.
    """

    def __init__(self, settings: ServerSettings, section: str) -> None:
        self.url = settings.url or ""
        self._settings = settings
        self._section = section
        self._headers = self._authorization()

    def post_each(
        self, payloads: Iterable[Any], schema: type[Answer]
    ) -> Generator[tuple[int, Answer], None, None]:
        """Posts payloads, taken as there is room for them, and yields the answers as they come.

        Yields:
            (number of the payload, answer). Close the iterator, or exhaust it, to end the requests.

        Raises:
            RemoteError: The server cannot be reached, or fails again and again.
            UserError: The server refuses a request, or its answer breaks the schema.
        """
        stopped = threading.Event()
        waiting = enumerate(payloads)
        concurrency = self._settings.concurrency
        timeout = self._settings.timeout_seconds
        pool = ThreadPoolExecutor(concurrency, thread_name_prefix="remote")
        limits = httpx.Limits(max_connections=concurrency)
        under_way: dict[Future[Answer], int] = {}
        client = httpx.Client(headers=self._headers, timeout=timeout, limits=limits)

        def send(payload: Any) -> Answer:
            body = self._post(client, payload, stopped)
            try:
                return schema.model_validate_json(body)
            except ValidationError as error:
                first = error.errors()[0]
                place = ".".join(map(str, first["loc"])) or "body"
                what = f"{place}: {first['msg']}; it begins {_start_of(body)}"
                raise self.disagreement(what) from error

        try:
            while True:
                while len(under_way) < _QUEUED * concurrency:
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
            pool.shutdown(wait=False, cancel_futures=True)
            # A request under way would leave its connection open if the client were closed now.
            threading.Thread(target=_close_after, args=(pool, client), name="remote-end").start()

    def _post(self, client: httpx.Client, payload: Any, stopped: threading.Event) -> bytes:
        reason = ""
        for attempt in range(ATTEMPTS):
            if stopped.is_set():
                break
            wait_seconds = WAIT_SECONDS * 2**attempt
            try:
                response, body = self._answer(client, payload)
            except httpx.RequestError as error:
                reason = f"{type(error).__name__}: {error}"
            else:
                # Other statuses are no matter of the moment, which a retry may cure.
                if response.status_code != _TOO_MANY_REQUESTS and response.status_code < 500:
                    self._check_status(response, body)
                    return body
                reason = f"status {response.status_code}: {_start_of(body)}"
                # Seconds; a date in its place is not waited for.
                asked = response.headers.get("retry-after", "")
                if asked.isdecimal():
                    wait_seconds = max(wait_seconds, float(asked))
            if attempt + 1 < ATTEMPTS:
                stopped.wait(min(wait_seconds, _LONGEST_WAIT_SECONDS))
        raise RemoteError(f"{self.url} does not serve; its last failure: {reason}")

    def _answer(self, client: httpx.Client, payload: Any) -> tuple[httpx.Response, bytes]:
        """Posts once; the head of the answer, and its body without compression."""
        seconds = self._settings.timeout_seconds
        deadline = time.monotonic() + seconds
        body = bytearray()
        with client.stream("POST", self.url, json=payload) as response:
            for part in response.iter_bytes():
                body += part
                if len(body) > LARGEST_ANSWER:
                    raise self.disagreement(f"it is longer than {LARGEST_ANSWER >> 20} MiB")
                if time.monotonic() > deadline:
                    raise httpx.ReadTimeout(f"the answer is not whole after {seconds:g} s")
        return response, bytes(body)

    def _check_status(self, response: httpx.Response, body: bytes) -> None:
        settings = self._settings
        if response.status_code in (401, 403):
            raise UserError(
                f"{self.url} refuses the key (status {response.status_code})",
                f"check the environment variable {settings.key_env}"
                if settings.key_env
                else f"set {self._section}.key_env to the name of the variable that holds the key",
            )
        if not response.is_success:
            raise UserError(
                f"{self.url} refuses a request with status {response.status_code}: "
                f"{_start_of(body)}",
                f"check {self._section}.url, the settings beside it, and what the server serves",
            )

    def disagreement(self, what: str) -> UserError:
        """The error of an answer that is not what was agreed."""
        return UserError(
            f"the answer of {self.url} is not what was agreed: {what}",
            "correct the server; docs/oracles.md has the schema",
        )

    def _authorization(self) -> dict[str, str]:
        name = self._settings.key_env
        if name is None:
            return {}
        if not os.environ.get(name):
            raise UserError(
                f"{self._section}.key_env is {name}, and that environment variable is not set",
                f"export {name} where the stage runs",
            )
        return {"Authorization": f"Bearer {os.environ[name]}"}


def _close_after(pool: ThreadPoolExecutor, client: httpx.Client) -> None:
    """Closes the connections once no request is under way."""
    pool.shutdown(wait=True)
    client.close()


def _start_of(body: bytes) -> str:
    """The first characters of an answer, for messages."""
    return repr(body[:200].decode(errors="replace"))
