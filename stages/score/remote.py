"""Requests to a server: several at once, each retried with growing pauses."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from queue import SimpleQueue
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from stages.contract.errors import GebError, UserError
from stages.score.oracle import OracleVerdict
from stages.score.params import ServerSettings

Answer = TypeVar("Answer", bound=BaseModel)
RequestRows = Sequence[Mapping[str, Any]]
ATTEMPTS = 5
WAIT_SECONDS = 1.0
"""Wait before the second attempt; doubled each time."""
LARGEST_ANSWER = 64 << 20
"""Most bytes of an answer, its compression undone."""
# A server that asks for a longer wait than this is as good as down.
_LONGEST_WAIT_SECONDS = 60.0
# Statuses by which servers refuse what a request asks: it is too long, for example.
_REFUSALS = (400, 413, 422)


class RemoteError(GebError):
    """The server failed at every attempt; a later attempt of the stage may succeed."""


class RefusedRequestError(UserError):
    """The server refuses what a request asks; it may answer others."""


class Remote:
    """A server that takes JSON by POST.

    Threads send and the main thread waits, so that SIGTERM ends the stage at once. Messages name
    the section of the configuration that the settings are.
    """

    def __init__(self, settings: ServerSettings, section: str) -> None:
        self.url = settings.url or ""
        self._key_env = settings.key_env
        self._section = section
        self._timeout_seconds = settings.timeout_seconds
        self._concurrency = settings.concurrency
        self._has_failed = False
        self._headers = self._authorization()

    def score(
        self,
        rows: RequestRows,
        starts: Sequence[int],
        verdicts: Callable[[RequestRows], Sequence[OracleVerdict]],
    ) -> Iterator[tuple[int, OracleVerdict]]:
        """Scores blocks of rows in threads and yields the verdicts of each block as it is done.

        ``starts`` are the first rows of the blocks, and the number of rows. ``verdicts`` scores a
        block by calls of :meth:`post`.
        """

        def ask(block_rows: RequestRows) -> Sequence[OracleVerdict]:
            try:
                return verdicts(block_rows)
            except BaseException:
                # Set in this thread, which begins with the next block at once.
                self._has_failed = True
                raise

        # Blocks in the order of their ends: an answer is kept before a later failure.
        ended: SimpleQueue[Future[Sequence[OracleVerdict]]] = SimpleQueue()
        blocks = {}
        pool = ThreadPoolExecutor(self._concurrency, thread_name_prefix="remote")
        self._client = httpx.Client(
            headers=self._headers,
            timeout=self._timeout_seconds,
            limits=httpx.Limits(max_connections=self._concurrency),
        )
        try:
            for start, stop in pairwise(starts):
                block = pool.submit(ask, rows[start:stop])
                blocks[block] = start
                block.add_done_callback(ended.put)
            for _ in blocks:
                block = ended.get()
                yield from enumerate(block.result(), blocks[block])
        finally:
            # After a failure nothing more is asked, and requests under way are not waited for.
            pool.shutdown(wait=False, cancel_futures=True)
            self._client.close()

    def post(self, payload: Any, schema: type[Answer]) -> Answer:
        """Posts a payload and reads the answer.

        Raises:
            RemoteError: The server cannot be reached, or fails again and again.
            UserError: The server refuses the request, or its answer breaks the schema.
        """
        body = self._body(payload)
        try:
            return schema.model_validate_json(body)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or "body"
            reason = f"{place}: {first['msg']}; it begins {_start_of(body)}"
            raise self.disagreement(reason) from error

    def disagreement(self, reason: str) -> UserError:
        """The error of an answer that breaks the schema."""
        return UserError(
            f"the answer of {self.url} breaks the schema: {reason}",
            "correct the server; docs/oracles.md has the schema",
        )

    def _body(self, payload: Any) -> bytes:
        reason = ""
        for attempt in range(ATTEMPTS):
            if self._has_failed:
                break
            wait_seconds = WAIT_SECONDS * 2**attempt
            try:
                response, body = self._send(payload)
            except httpx.RequestError as error:
                reason = f"{type(error).__name__}: {error}"
            else:
                passes = response.status_code == httpx.codes.TOO_MANY_REQUESTS
                if not passes and not response.is_server_error:
                    self._check_status(response, body)
                    return body
                reason = f"status {response.status_code}: {_start_of(body)}"
                # Seconds; a date in its place is not waited for.
                retry_after = response.headers.get("retry-after", "")
                if retry_after.isdecimal():
                    wait_seconds = max(wait_seconds, float(retry_after))
            if attempt + 1 < ATTEMPTS:
                time.sleep(min(wait_seconds, _LONGEST_WAIT_SECONDS))
        raise RemoteError(f"{self.url} does not serve; its last failure: {reason}")

    def _send(self, payload: Any) -> tuple[httpx.Response, bytes]:
        """Posts once; the head of the answer, and its body."""
        deadline = time.monotonic() + self._timeout_seconds
        body = bytearray()
        with self._client.stream("POST", self.url, json=payload) as response:
            for part in response.iter_bytes():
                body += part
                if len(body) > LARGEST_ANSWER:
                    raise self.disagreement(f"it is longer than {LARGEST_ANSWER >> 20} MiB")
                # httpx itself bounds each read alone.
                if time.monotonic() > deadline:
                    raise httpx.ReadTimeout(f"no whole answer after {self._timeout_seconds:g} s")
        return response, bytes(body)

    def _check_status(self, response: httpx.Response, body: bytes) -> None:
        if response.status_code in (401, 403):
            raise UserError(
                f"{self.url} refuses the key (status {response.status_code})",
                f"check the environment variable that {self._section}.key_env names "
                f"({self._key_env or 'unset'})",
            )
        if not response.is_success:
            is_about_the_request = response.status_code in _REFUSALS
            kind = RefusedRequestError if is_about_the_request else UserError
            raise kind(
                f"{self.url} refuses a request with status {response.status_code}: "
                f"{_start_of(body)}",
                f"check the settings of {self._section}, and what the server serves",
            )

    def _authorization(self) -> dict[str, str]:
        if self._key_env is None:
            return {}
        # A key that was read from a file may end in a newline; httpx quotes what it cannot send.
        key = os.environ.get(self._key_env, "").strip()
        if not (key and key.isascii() and key.isprintable()):
            raise UserError(
                f"{self._section}.key_env is {self._key_env}, and that environment variable is not "
                "set, or has characters that are not printable ASCII",
                f"export {self._key_env} with the key alone where the stage runs",
            )
        return {"Authorization": f"Bearer {key}"}


def _start_of(body: bytes) -> str:
    """The first characters of an answer, for messages."""
    return repr(body[:200].decode(errors="replace"))
