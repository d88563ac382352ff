"""One computation of a key of a store in a bucket: inputs come down before it, results go up.

Runners of a host that holds the store's local folder do this around a stage. A stage in a pod that
shares no folder with its orchestrator does it by itself, see `stages/harness/from_bucket.py`; two
more folders of the bucket serve it::

    inputs/<digest>/<name>                  files from outside the store, by their content
    orchestrators/<stage>/<key>/<owner>     changes as long as the orchestrator lives

The owner is the id of the orchestrator's local folder: one that starts elsewhere is another.
"""

import contextlib
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from stages.contract.digests import files_of
from stages.contract.errors import ConflictError, DamagedArtifactError, StoppedError, StoreError
from stages.contract.events import Log, OnEvent, warning_to
from stages.contract.request import ArtifactInput, FileInput, Input, Request
from stages.store.base import Store
from stages.store.locks import exclusive_lock
from stages.store.remote.store import RemoteStore
from stages.store.remote.transfer import download_folder, repeated, upload_missing

SIGN_SECONDS = 20.0
"""Time between two signs of an orchestrator, and between two looks for one."""
_INPUTS = "inputs"


def compute(
    store: RemoteStore,
    request: Request,
    run: Callable[[Request], object],
    sync_seconds: float,
    on_event: OnEvent,
    stopping: threading.Event,
) -> None:
    """Makes an artifact, whose key the caller holds, in this host's local folder and uploads it.

    ``run`` runs the stage on a request whose store is that folder. Its state (checkpoints, chunks)
    goes to the bucket every ``sync_seconds``. ``stopping`` keeps transfers from beginning.
    """
    stage = request.stage
    key = request.key
    if request.writes_registry:
        # Nobody knows whether the registry records of an unpushed artifact were pushed.
        store.drop_local(stage, key)
    artifact = store.unpushed(stage, key)
    work = store.work(stage, key)
    if artifact is None:

        def fetch(source: Input) -> Input:
            if stopping.is_set():
                raise StoppedError("stopped before the inputs were here")
            return _fetched(store, source, on_event)

        local = with_inputs(request, fetch).model_copy(update={"store": str(store.local.root)})
        try:
            if work.pull():
                on_event(Log(message="goes on from where an attempt on another host ended"))
        except DamagedArtifactError as error:
            warning_to(on_event)(f"{error}; this attempt begins from the start")
        # The artifact may do without a snapshot that fails.
        with repeated(sync_seconds, work.push):
            if request.writes_registry:
                _run_with_registry(store, local, run, on_event)
            else:
                run(local)
        artifact = store.local.load(stage, key)
    # Without one, the executor reports that the stage left none.
    if artifact is not None:
        store.push(artifact)
        work.drop()


def _run_with_registry(
    store: RemoteStore, local: Request, run: Callable[[Request], object], on_event: OnEvent
) -> None:
    """Runs a stage that writes the registry until no other host changes it meanwhile."""
    while True:
        try:
            with store.exclusive("models"):
                run(local)
            return
        except ConflictError:
            # The stage decided on records that another host has changed since.
            store.drop_local(local.stage, local.key)
            on_event(Log(message="another host changed the model registry; decides again"))


def _fetched(store: RemoteStore, source: Input, on_event: OnEvent) -> Input:
    """An input, on this host; DamagedArtifactError if the bucket has another or none."""
    if isinstance(source, FileInput) and "://" in source.location:
        place = store.root / source.location.removeprefix(f"{store.location}/")
        download_folder(store.bucket, place.parent.relative_to(store.root).as_posix(), place.parent)
        return source.model_copy(update={"location": str(place)})
    if not isinstance(source, ArtifactInput):
        return source
    artifact = store.find(source.stage, source.key, warn=warning_to(on_event))
    if artifact is None or artifact.manifest.digest(source.path) != source.digest:
        raise DamagedArtifactError(
            f"{store.location} has no artifact {source.stage}/{source.key[:12]} with digest "
            f"{source.digest[:12]} any more; run again to make it anew"
        )
    artifact.file(source.path)
    return source


def with_inputs(request: Request, change: Callable[[Input], Input]) -> Request:
    """A request each of whose inputs is what ``change`` makes of it."""
    inputs = {
        name: tuple(change(source) for source in group) for name, group in request.inputs.items()
    }
    return request.model_copy(update={"inputs": inputs})


def sent_input(store: RemoteStore, source: FileInput) -> FileInput:
    """A file or folder from outside the store, uploaded unless the bucket has it."""
    place = Path(source.location)
    folder = f"{_INPUTS}/{source.digest}"
    paths = [place] if place.is_file() else files_of(place)
    files = {path.relative_to(place.parent).as_posix(): path for path in paths}
    # Shards that start together upload a model once.
    with exclusive_lock(store.root / "leases" / f"{source.digest}.guard"):
        upload_missing(store.bucket, folder, files)
    # A state that no file has: whoever brings it down hashes it, however large it is.
    location = f"{store.location}/{folder}/{place.name}"
    return source.model_copy(update={"location": location, "state": "sent"})


@contextlib.contextmanager
def signs_of_life(store: RemoteStore, request: Request) -> Iterator[None]:
    """Within the block the bucket shows that this orchestrator lives."""
    name = f"{_sign_name(request)}/{store.folder_id}"

    def show() -> None:
        store.bucket.put(name, uuid.uuid4().hex.encode())

    show()
    try:
        with repeated(SIGN_SECONDS, show):
            yield
    finally:
        with contextlib.suppress(StoreError):
            store.bucket.delete([name])


@contextlib.contextmanager
def signs_passed_on(store: RemoteStore, request: Request, owner: str, home: Path) -> Iterator[None]:
    """Within the block a file below ``home`` changes as long as the orchestrator ``owner`` lives.

    A bucket that does not answer says nothing about the orchestrator, which counts as alive.
    """
    seen = ""
    sign = Store(home).orchestrator_path(request.stage, request.key)
    sign.parent.mkdir(parents=True, exist_ok=True)

    def look() -> None:
        nonlocal seen
        try:
            entry = store.bucket.get(f"{_sign_name(request)}/{owner}")
        except StoreError:
            sign.touch()
            return
        if entry and entry.etag != seen:
            seen = entry.etag
            sign.touch()

    with repeated(SIGN_SECONDS, look):
        yield


def _sign_name(request: Request) -> str:
    return f"orchestrators/{request.stage}/{request.key}"
