"""Opening a store, wherever it is."""

from __future__ import annotations

import os
from pathlib import Path

from stages.contract.errors import UserError
from stages.contract.store import Store

_CACHE = "GEB_CACHE"


def cache_home() -> Path:
    """Where this host keeps the local folders of stores in buckets."""
    named = os.environ.get(_CACHE)
    place = Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "geb"
    return place.expanduser().absolute()


def location_of(location: str) -> str:
    """What opens the same store from any folder; nothing is opened."""
    return location if "://" in location else str(Path(location).expanduser().absolute())


def open_store(location: str, *, create: bool = False) -> Store:
    """Opens the store in a folder or in a bucket.

    Args:
        location: Folder, or ``s3://bucket/prefix``.
        create: Make an empty store where there is nothing yet.

    Raises:
        UserError: The location, the bucket or the credentials are wrong.
        StoreError: There is no store, or it cannot be reached. Nothing is ever recomputed because
            of it.
    """
    if "://" in location:
        # Imported here: whoever keeps to folders needs no client of object storage.
        from stages.contract.remote.store import RemoteStore

        return RemoteStore.connect(location, cache_home(), create=create)
    store = Store.open(location, create=create)
    if store.mirror_of is not None:
        raise UserError(
            f"{store.root} is the local folder of the store {store.mirror_of}",
            f"name the store itself: {store.mirror_of}",
        )
    return store
