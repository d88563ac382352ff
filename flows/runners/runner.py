"""One attempt at a stage: what is the same at every place.

It owns the key, fetches what the stage reads, finds or starts the stage, follows it, raises the
error of its end, and sends what it made. A :class:`~flows.runners.place.Place` does the rest.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from flows.pipeline.placement import Execution
from flows.runners.attempt_log import AttemptLog, new_log, write_request
from flows.runners.ending import Ending, raise_for
from flows.runners.place import (
    NoRoomError,
    Place,
    PlaceAwayError,
    PlaceNotice,
    StageJob,
    Work,
)
from stages.contract.errors import (
    LeaseLostError,
    RefusedError,
    StoppedError,
    StoreError,
    UserError,
)
from stages.contract.events import Log, OnEvent, warning_to
from stages.contract.request import FileInput, Input, Request
from stages.store.base import Store
from stages.store.locks import FileLease
from stages.store.opening import open_store
from stages.store.remote.store import RemoteStore
from stages.store.remote.sync import compute, sent_input, signs_of_life, with_inputs

# Longest wait for the end of all stages, and for their state to reach a bucket.
_STOP_SECONDS = 600.0
ROOM_SECONDS = 5.0
"""Time between two tries to start a stage at a place that is full."""
CheckOwner = Callable[[], None]


class Runner:
    """Runs stages at a place and waits for them. Safe to use from several threads.

    A running stage's state (checkpoints, chunks) goes to a store in a bucket every
    ``execution.sync_seconds``. Stages that do not see the store's local folder get requests that
    they fetch from the bucket, as they do with inputs.
    """

    def __init__(self, place: Place, execution: Execution) -> None:
        self._place = place
        self._execution = execution
        self._num_running = 0
        self._changed = threading.Condition()
        self.closed = threading.Event()
        """When set, no stage starts any more; those at work go on."""
        self.stopping = threading.Event()
        """Set by :meth:`stop_all`."""

    def run(self, request: Request, on_event: OnEvent) -> None:
        """Runs one stage to its end; afterwards its artifact is in the store.

        ``on_event`` is called in the calling thread with every event of the stage.

        Raises:
            UserError: The stage refused the request or its data (exit code 64).
            RefusedError: The place refused the stage.
            StageFailedError: It ended otherwise; a retry may help.
            PreemptedError: The scheduler or the host took its machine from it: a kind of
                StageFailedError that uses up no retry while checkpoints move on.
            StoppedError: :meth:`stop_all` ended it, or it was not to start any more.
        """
        with self._counted():
            store = open_store(request.store)
            lease = FileLease(store.orchestrator_path(request.stage, request.key))
            lease.acquire(
                waiting=lambda holder: on_event(
                    PlaceNotice(
                        message=f"another run on {holder.host} looks after it; waiting for it",
                        waits=True,
                    )
                ),
                stopping=self.closed,
            )
            with lease:
                warn = warning_to(on_event)
                if store.find(request.stage, request.key, warn=warn) is not None:
                    on_event(Log(message="another run has computed it"))
                elif isinstance(store, RemoteStore):
                    self._attempt_in_bucket(store, request, on_event, lease.check)
                else:
                    path = new_log(store, request)
                    self._attempt(store, request, path, on_event, lease.check)

    def stop_all(self) -> None:
        """Ends all stages that are running and returns when they are gone."""
        self.closed.set()
        self.stopping.set()
        with self._changed:
            self._changed.wait_for(lambda: not self._num_running, _STOP_SECONDS)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        with self._changed:
            self._num_running += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_running -= 1
                self._changed.notify_all()

    def _attempt(
        self,
        store: Store,
        request: Request,
        path: Path,
        on_event: OnEvent,
        check_owner: CheckOwner,
    ) -> None:
        """One attempt, with its log, at a stage whose store is a folder of this host."""
        with path.open("a", encoding="utf-8") as file:
            log = AttemptLog(path, file)
            sent = write_request(request, path)
            job = StageJob(request, store, sent, log, on_event, self.stopping, check_owner)
            try:
                ending = self._follow(job)
            except UserError as error:
                # A damaged record is the store's matter.
                if type(error) is UserError:
                    raise RefusedError(error.message, error.remedy) from error
                raise
        # The stage could not remove its work folder, a mount. One that is not empty is a failed
        # attempt's.
        with contextlib.suppress(OSError):
            store.work_path(request.stage, request.key).rmdir()
        raise_for(ending, log, request, stopped=self.stopping.is_set())

    def _follow(self, job: StageJob) -> Ending:
        work = self._place.find(job)
        if work is None:
            work = self._start(job)
        else:
            job.on_event(Log(message=f"taking over {work.title}, which computes this already"))
        try:
            ending = work.follow()
        except (LeaseLostError, PlaceAwayError):
            # Another orchestrator has taken the work over, or the next attempt will.
            raise
        except BaseException:
            # Its events cannot be listened to any more, or it would never start.
            work.remove()
            raise
        work.remove()
        return ending

    def _start(self, job: StageJob) -> Work:
        """Starts the stage as soon as its place has room for it."""
        while not self.closed.is_set():
            job.check_owner()
            try:
                return self._place.start(job)
            except NoRoomError as error:
                job.notice(f"waiting: {error}", waits=True)
                self.closed.wait(ROOM_SECONDS)
        raise StoppedError(f"{job.request.title}: stopped while waiting for its place")

    def _attempt_in_bucket(
        self, store: RemoteStore, request: Request, on_event: OnEvent, check_owner: CheckOwner
    ) -> None:
        """One attempt at a stage, whose store is in a bucket."""

        def start(local: Request) -> None:
            path = new_log(store.local, local)
            try:
                self._attempt(store.local, local, path, on_event, check_owner)
            finally:
                # An error of the upload must not hide the attempt's own; the log then stays here.
                with contextlib.suppress(StoreError, OSError):
                    store.share(path)

        if self._execution.sees(store.root):
            seconds = self._execution.sync_seconds
            compute(store, request, start, seconds, on_event, self.closed)
            return

        def sent(source: Input) -> Input:
            if isinstance(source, FileInput) and not self._execution.sees(Path(source.location)):
                return sent_input(store, source)
            return source

        local = with_inputs(request, sent).model_copy(update={"store": str(store.root)})
        with signs_of_life(store, request):
            start(local)
