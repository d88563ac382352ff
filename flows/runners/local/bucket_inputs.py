"""External inputs for stages on other hosts, through the store's bucket."""

from __future__ import annotations

import functools
import socket
from pathlib import Path

from stages.contract.digests import digest_of, files_of, state_of
from stages.contract.errors import UserError
from stages.contract.remote.store import RemoteStore
from stages.contract.request import FileInput, Input, Request
from stages.contract.store import OnBytes
from stages.contract.stores import remote_store


def upload_inputs(request: Request) -> None:
    """Uploads the request's files of this host, for the host that runs its stage."""
    store = remote_store(request.store)
    if store is not None:
        for each in request.sources():
            if isinstance(each, FileInput):
                store.external_inputs.upload(each)


def with_local_inputs(store: RemoteStore, request: Request, on_bytes: OnBytes) -> Request:
    """The request with the places of its files on this host.

    Raises:
        UserError: A file is neither here nor in the bucket.
    """

    def place(source: Input) -> Input:
        if not isinstance(source, FileInput):
            return source
        path = Path(source.location)
        # A copy on this host has times of its own; a change while it is hashed then shows.
        state = state_of(path) if path.exists() else None
        if _is_here(source):
            return source.model_copy(update={"state": state})
        found = store.external_inputs.download(source, on_bytes)
        if found is None:
            raise UserError(
                f"{source.location} is not on {socket.gethostname()}, or is another file there",
                "put it there, name a hub id, or run this stage on the host that has it",
            )
        return source.model_copy(update={"location": str(found), "state": state_of(found)})

    inputs = {name: tuple(map(place, group)) for name, group in request.inputs.items()}
    return request.model_copy(update={"inputs": inputs})


def _is_here(source: FileInput) -> bool:
    path = Path(source.location)
    if not path.exists():
        return False
    files = files_of(path) if path.is_dir() else [path]
    stats = tuple((str(each), each.stat().st_size, each.stat().st_mtime_ns) for each in files)
    return _known_digest(path, stats) == source.digest


@functools.lru_cache(maxsize=256)
def _known_digest(path: Path, stats: tuple[tuple[str, int, int], ...]) -> str:
    """Digest of a file or folder, taken once as long as nothing of it changes."""
    return digest_of(path) if stats else ""
