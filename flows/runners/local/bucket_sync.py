"""Bucket synchronisation for runners of this host: inputs come down before a stage, results go up.

The stage's program sees the store's local folder and nothing else.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from flows.runners.base import OnEvent, Runner
from flows.runners.local.bucket_inputs import with_local_inputs
from stages.contract.errors import DamagedArtifactError, StoppedError, StoreError
from stages.contract.events import Log, Progress
from stages.contract.remote.lease import RemoteLease
from stages.contract.remote.store import RemoteStore
from stages.contract.request import ArtifactInput, Request
from stages.contract.store import Artifact, OnBytes
from stages.contract.stores import remote_store

_MIB = 1 << 20
# Most time that a stopping run waits for the state of its stages to reach the bucket.
_LAST_PUSH_SECONDS = 600.0


class BucketSyncRunner:
    """A runner of this host, for stores in folders and in buckets.

    Args:
        runner: Starts stages that find their store in a folder.
        sync_seconds: How often the state of a running stage (checkpoints, chunks) goes to the
            bucket.
    """

    def __init__(self, runner: Runner, sync_seconds: float) -> None:
        self.name = runner.name
        self._runner = runner
        self._sync_seconds = sync_seconds
        self._stopping = threading.Event()
        self._running = Running()

    def run(self, request: Request, on_event: OnEvent) -> None:
        """See :class:`flows.runners.base.Runner`."""
        store = remote_store(request.store)
        if store is None:
            self._runner.run(request, on_event)
            return
        with self._running:
            self._run(store, request, on_event)

    def _run(self, store: RemoteStore, request: Request, on_event: OnEvent) -> None:
        lease = store.lease(request.stage, request.key)
        lease.acquire(
            waiting=lambda holder: on_event(
                Log(message=f"computed by pid {holder['pid']} on {holder['host']}; waiting for it")
            ),
            stopping=self._stopping,
        )
        with lease:
            warn = _warner(on_event)
            if store.find(request.stage, request.key, warn=warn) is not None:
                on_event(Log(message="the store has it by now"))
                return
            if request.writes_registry:
                # Of one that was not pushed nobody knows whether its registry records were.
                store.drop_local(request.stage, request.key)
            artifact = store.unpushed(request.stage, request.key)
            if artifact is None:
                artifact = self._compute(store, request, lease, on_event)
            store.push(
                artifact, check_lease=lease.check, on_bytes=self._shown(on_event, "MiB uploaded")
            )
            store.work(request.stage, request.key).drop()

    def stop_all(self) -> None:
        """See :class:`flows.runners.base.Runner`."""
        self._stopping.set()
        self._runner.stop_all()
        # The state of the stages is still on its way to the bucket.
        self._running.wait_for_none(_LAST_PUSH_SECONDS)

    def has_running(self, request: Request) -> bool:
        """See :class:`flows.runners.base.Runner`."""
        return self._runner.has_running(request)

    def _compute(
        self, store: RemoteStore, request: Request, lease: RemoteLease, on_event: OnEvent
    ) -> Artifact:
        for each in _artifact_inputs(request):
            self._fetch(store, each, on_event)
        work = store.work(request.stage, request.key)
        try:
            if work.pull(self._shown(on_event, "MiB of the last attempt")):
                on_event(Log(message="goes on from where an attempt on another host ended"))
        except DamagedArtifactError as error:
            _warner(on_event)(f"{error}; this attempt begins from the start")
        registry = (
            store.exclusive("models") if request.writes_registry else contextlib.nullcontext()
        )
        local = with_local_inputs(store, request, self._shown(on_event, "MiB of inputs"))
        local = local.model_copy(update={"store": str(store.local.root)})
        with (
            registry,
            work.pushed_every(self._sync_seconds, lease.check),
            _shared_logs(store, request),
        ):
            self._runner.run(local, on_event)
        artifact = store.unpushed(request.stage, request.key, verify=False)
        if artifact is None:
            raise DamagedArtifactError(
                f"{request.place} ended well, but left no artifact "
                f"{request.stage}/{request.key[:12]} in {store.local.root}"
            )
        return artifact

    def _fetch(self, store: RemoteStore, wanted: ArtifactInput, on_event: OnEvent) -> None:
        """Brings one input here.

        Raises:
            DamagedArtifactError: The bucket does not have it as the request names it; it is set
                aside, so that the next run makes it again.
        """
        artifact = store.find(wanted.stage, wanted.key, warn=_warner(on_event))
        if artifact is None or artifact.manifest.digest(wanted.path) != wanted.digest:
            raise DamagedArtifactError(
                f"{store.location} has no artifact {wanted.stage}/{wanted.key[:12]} with digest "
                f"{wanted.digest[:12]} any more; run again to make it anew"
            )
        try:
            artifact.file(wanted.path, on_bytes=self._shown(on_event, "MiB of inputs"))
        except DamagedArtifactError as error:
            aside = store.set_aside(wanted.stage, wanted.key)
            raise DamagedArtifactError(
                f"{error}. Set aside in {aside}; run again to make it anew"
            ) from error

    def _shown(self, on_event: OnEvent, unit: str) -> OnBytes:
        def show(done: int, total: int) -> None:
            if self._stopping.is_set():
                raise StoppedError(f"stopped at {done} of {total} bytes")
            if total >= _MIB:
                on_event(Progress(done=done // _MIB, total=total // _MIB, unit=unit))

        return show


@contextlib.contextmanager
def _shared_logs(store: RemoteStore, request: Request) -> Iterator[None]:
    try:
        yield
    finally:
        # An error of the upload must not hide the attempt's own; the log then stays on this host.
        with contextlib.suppress(StoreError, OSError):
            store.share(store.local.log_path(request.stage, request.key))


def _artifact_inputs(request: Request) -> list[ArtifactInput]:
    return [each for each in request.sources() if isinstance(each, ArtifactInput)]


def _warner(on_event: OnEvent) -> Callable[[str], None]:
    return lambda message: on_event(Log(level="warning", message=message))


class Running:
    """Number of blocks of code that are entered; threads enter and leave as they like."""

    def __init__(self) -> None:
        self._ended = threading.Condition()
        self._number = 0

    def __enter__(self) -> None:
        with self._ended:
            self._number += 1

    def __exit__(self, *error: object) -> None:
        with self._ended:
            self._number -= 1
            self._ended.notify_all()

    def wait_for_none(self, seconds: float | None = None) -> None:
        """Waits until no block is entered, for ``seconds`` at the most."""
        with self._ended:
            self._ended.wait_for(lambda: not self._number, seconds)
