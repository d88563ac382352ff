"""Bucket synchronisation for runners: inputs come down before a stage, results go up.

The stage's program sees the store's local folder and nothing else; where it cannot see that folder,
it fetches and sends by itself.
"""

import contextlib
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from flows.runners.base import OnEvent, Runner
from stages.contract.errors import DamagedArtifactError, StoreError
from stages.contract.request import FileInput, Input, Request
from stages.store.opening import open_store
from stages.store.remote.store import RemoteStore
from stages.store.remote.sync import Sync, sent_input, signs_of_life, with_inputs

# Most time that a stopping run waits for the state of its stages to reach the bucket.
_LAST_PUSH_SECONDS = 600.0


class BucketSyncRunner:
    """A runner for stores in folders and in buckets.

    The state of a running stage (checkpoints, chunks) goes to the bucket every ``sync_seconds``.
    Stages that do not see the store's local folder, by ``sees``, get requests that they fetch from
    the bucket, as they do with inputs.
    """

    def __init__(
        self, runner: Runner, sync_seconds: float, sees: Callable[[Path], bool] = lambda path: True
    ) -> None:
        self.name = runner.name
        self._runner = runner
        self._sync_seconds = sync_seconds
        self._sees = sees
        self._stopping = threading.Event()
        self._ended = threading.Condition()
        self._number_running = 0

    def run(self, request: Request, on_event: OnEvent) -> None:
        """See :class:`flows.runners.base.Runner`."""
        store = open_store(request.store)
        if not isinstance(store, RemoteStore):
            self._runner.run(request, on_event)
            return
        with self._ended:
            self._number_running += 1
        try:
            sync = Sync(store, request, on_event, self._stopping)
            if self._sees(store.root):
                sync.compute(partial(self._start, store, on_event), self._sync_seconds)
            else:
                self._run_there(sync)
        finally:
            with self._ended:
                self._number_running -= 1
                self._ended.notify_all()

    def stop_all(self) -> None:
        """See :class:`flows.runners.base.Runner`."""
        self._stopping.set()
        self._runner.stop_all()
        # The state of the stages is still on its way to the bucket.
        with self._ended:
            self._ended.wait_for(lambda: not self._number_running, _LAST_PUSH_SECONDS)

    def has_running(self, request: Request) -> bool:
        """See :class:`flows.runners.base.Runner`."""
        local = str(open_store(request.store).root)
        return self._runner.has_running(request.model_copy(update={"store": local}))

    def _run_there(self, sync: Sync) -> None:
        """Runs a stage that fetches and sends by itself, and finds its artifact in the bucket."""
        store = sync.store
        request = sync.request

        def sent(source: Input) -> Input:
            if isinstance(source, FileInput) and not self._sees(Path(source.location)):
                return sent_input(store, source)
            return source

        with sync.held() as is_wanted:
            if not is_wanted:
                return
            local = with_inputs(request, sent).model_copy(update={"store": str(store.root)})
            with signs_of_life(store, request):
                self._start(store, sync.on_event, local)
            if store.load(request.stage, request.key) is None:
                raise DamagedArtifactError(
                    f"{request.place} ended well, but {store.location} has no artifact "
                    f"{request.stage}/{request.key[:12]}"
                )

    def _start(self, store: RemoteStore, on_event: OnEvent, local: Request) -> None:
        try:
            self._runner.run(local, on_event)
        finally:
            # An error of the upload must not hide the attempt's own; the log then stays here.
            with contextlib.suppress(StoreError, OSError):
                store.share(store.local.log_path(local.stage, local.key))
