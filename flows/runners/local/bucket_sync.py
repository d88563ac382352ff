"""Bucket synchronisation for runners of this host: inputs come down before a stage, results go up.

The stage's program sees the store's local folder and nothing else.
"""

import contextlib
import threading
from collections.abc import Callable

from flows.runners.base import OnEvent, Runner
from stages.contract.errors import ConflictError, DamagedArtifactError, StoppedError, StoreError
from stages.contract.events import Log, Progress
from stages.contract.request import ArtifactInput, Request
from stages.store.base import Artifact, OnBytes
from stages.store.opening import open_store
from stages.store.remote.store import RemoteStore

_MIB = 1 << 20
# Most time that a stopping run waits for the state of its stages to reach the bucket.
_LAST_PUSH_SECONDS = 600.0
# Hosts that register at the same time take turns; each of them comes in here once a turn.
_REGISTRY_ATTEMPTS = 20


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
            self._run(store, request, on_event)
        finally:
            with self._ended:
                self._number_running -= 1
                self._ended.notify_all()

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
                # Nobody knows whether the registry records of an unpushed artifact were pushed.
                store.drop_local(request.stage, request.key)
            artifact = store.unpushed(request.stage, request.key)
            if artifact is None:
                artifact = self._compute(store, request, on_event)
            store.push(artifact, self._shown(on_event, "MiB uploaded"))
            store.work(request.stage, request.key).drop()

    def stop_all(self) -> None:
        """See :class:`flows.runners.base.Runner`."""
        self._stopping.set()
        self._runner.stop_all()
        # The state of the stages is still on its way to the bucket.
        with self._ended:
            self._ended.wait_for(lambda: not self._number_running, _LAST_PUSH_SECONDS)

    def has_running(self, request: Request) -> bool:
        """See :class:`flows.runners.base.Runner`."""
        return self._runner.has_running(request)

    def _compute(self, store: RemoteStore, request: Request, on_event: OnEvent) -> Artifact:
        for each in request.sources():
            if isinstance(each, ArtifactInput):
                self._fetch(store, each, on_event)
        work = store.work(request.stage, request.key)
        try:
            if work.pull(self._shown(on_event, "MiB of the last attempt")):
                on_event(Log(message="goes on from where an attempt on another host ended"))
        except DamagedArtifactError as error:
            _warner(on_event)(f"{error}; this attempt begins from the start")
        local = request.model_copy(update={"store": str(store.local.root)})
        for attempt in range(1, _REGISTRY_ATTEMPTS + 1):
            registry = (
                store.exclusive("models") if request.writes_registry else contextlib.nullcontext()
            )
            try:
                with registry, work.pushed_every(self._sync_seconds):
                    self._runner.run(local, on_event)
                break
            except ConflictError:
                # It was decided on records that another host has changed since.
                store.drop_local(request.stage, request.key)
                if attempt == _REGISTRY_ATTEMPTS:
                    raise
                on_event(Log(message="another host changed the model registry; decides again"))
            finally:
                # An error of the upload must not hide the attempt's own; the log then stays here.
                with contextlib.suppress(StoreError, OSError):
                    store.share(store.local.log_path(request.stage, request.key))
        artifact = store.local.load(request.stage, request.key)
        if artifact is None:
            raise DamagedArtifactError(
                f"{request.place} ended well, but left no artifact "
                f"{request.stage}/{request.key[:12]} in {store.local.root}"
            )
        return artifact

    def _fetch(self, store: RemoteStore, wanted: ArtifactInput, on_event: OnEvent) -> None:
        """Brings one input here.

        Raises:
            DamagedArtifactError: The bucket does not have it as the request names it.
        """
        artifact = store.find(wanted.stage, wanted.key, warn=_warner(on_event))
        if artifact is None or artifact.manifest.digest(wanted.path) != wanted.digest:
            raise DamagedArtifactError(
                f"{store.location} has no artifact {wanted.stage}/{wanted.key[:12]} with digest "
                f"{wanted.digest[:12]} any more; run again to make it anew"
            )
        artifact.file(wanted.path, on_bytes=self._shown(on_event, "MiB of inputs"))

    def _shown(self, on_event: OnEvent, unit: str) -> OnBytes:
        def show(done: int, total: int) -> None:
            if self._stopping.is_set():
                raise StoppedError(f"stopped at {done} of {total} bytes")
            if total >= _MIB:
                on_event(Progress(done=done // _MIB, total=total // _MIB, unit=unit))

        return show


def _warner(on_event: OnEvent) -> Callable[[str], None]:
    return lambda message: on_event(Log(level="warning", message=message))
