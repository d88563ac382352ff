"""Slots of a limit of Prefect's, held while a stage with GPUs runs.

The limit counts GPUs over all runs and hosts of a Prefect server. It is taken around the launch
alone: a stage whose artifact is in the store, or that another run computes, waits for no slot.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from flows.runners.base import OnEvent, Runner
from stages.contract.errors import StoppedError, UserError
from stages.contract.events import Log
from stages.contract.request import Request

# A dead holder's slots are free again after this time.
_LEASE_SECONDS = 60.0
_POLL_SECONDS = 2.0


class GpuLimitRunner:
    """A runner of this host whose stages with GPUs hold slots; to be used inside a flow run.

    Args:
        runner: Starts the stages.
        limit: Name of a global concurrency limit. A server without one of that name sets none.
    """

    def __init__(self, runner: Runner, limit: str) -> None:
        self.name = runner.name
        self._runner = runner
        self._limit = limit
        self._stopping = threading.Event()

    def run(self, request: Request, on_event: OnEvent) -> None:
        """See :class:`flows.runners.base.Runner`."""
        if request.resources.gpus == 0:
            self._runner.run(request, on_event)
            return
        with self._slots(request, on_event):
            self._runner.run(request, on_event)

    def stop_all(self) -> None:
        """See :class:`flows.runners.base.Runner`."""
        self._stopping.set()
        self._runner.stop_all()

    def has_running(self, request: Request) -> bool:
        """See :class:`flows.runners.base.Runner`."""
        return self._runner.has_running(request)

    @contextlib.contextmanager
    def _slots(self, request: Request, on_event: OnEvent) -> Iterator[None]:
        # Here: commands that start nothing do without Prefect.
        from prefect.concurrency.sync import concurrency

        number = request.resources.gpus
        if not self._is_limited(number):
            yield
            return
        slots = contextlib.ExitStack()
        told = False
        while True:
            try:
                # No retries: a wait of Prefect's own could not be ended by stop_all.
                slots.enter_context(
                    concurrency(
                        self._limit,
                        occupy=number,
                        max_retries=0,
                        lease_duration=_LEASE_SECONDS,
                        raise_on_lease_renewal_failure=False,
                    )
                )
                break
            except Exception as error:
                if not _is_taken(error):
                    raise
            if not told:
                told = True
                on_event(Log(message=f"waiting for {number} of the slots of limit {self._limit!r}"))
            if self._stopping.wait(_POLL_SECONDS):
                raise StoppedError(f"{request.place}: stopped, waiting for a GPU")
        with slots:
            yield

    def _is_limited(self, number: int) -> bool:
        from prefect.client.orchestration import get_client
        from prefect.exceptions import ObjectNotFound

        with get_client(sync_client=True) as client:
            try:
                limit = client.read_global_concurrency_limit_by_name(self._limit)
            except ObjectNotFound:
                return False
        if limit.active and number > limit.limit:
            raise UserError(
                f"the stage asks for {number} GPUs, the limit {self._limit!r} has {limit.limit}",
                f"lower resources.<stage>.gpus, or `prefect gcl update {self._limit} --limit N`",
            )
        return True


def _is_taken(error: Exception) -> bool:
    import httpx

    cause = error.__cause__
    return (
        isinstance(cause, httpx.HTTPStatusError)
        and cause.response.status_code == httpx.codes.LOCKED
    )
