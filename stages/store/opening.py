"""Opening a store, wherever it is."""

import os
from pathlib import Path

from stages.contract.errors import UserError
from stages.store.base import Store

CACHE_VARIABLE = "GEB_CACHE"
"""Environment variable with the folder of :func:`cache_home`."""


def cache_home() -> Path:
    """Folder of this host for the local folders of stores in buckets."""
    named = os.environ.get(CACHE_VARIABLE)
    place = Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "geb"
    return place.expanduser().absolute()


def location_of(location: str) -> str:
    """Location that opens the same store from any folder; UserError if it is blank."""
    if not location.strip():
        raise UserError(f"{location!r} does not name a store", "name a folder, or a bucket")
    return location if "://" in location else str(Path(location).expanduser().absolute())


def local_folder(location: str) -> Path:
    """Folder of this host that holds a store, or the local folders of stores in buckets."""
    return cache_home() if "://" in location else Path(location_of(location))


def open_store(location: str, *, create: bool = False) -> Store:
    """Opens the store in a folder or in a bucket, an ``s3://``, ``gs://`` or ``az://`` address.

    With ``create`` it makes an empty one if there is nothing yet.

    Raises:
        UserError: The location, the bucket or the credentials are wrong.
        StoreError: The store is missing, or it cannot be reached. Nothing is ever recomputed for
            that.
    """
    location = location_of(location)
    if "://" in location:
        # Imported here: stores in folders need no client of object storage.
        from stages.store.remote.store import RemoteStore

        return RemoteStore.connect(location, cache_home(), create=create)
    store = Store.in_folder(location, create=create)
    if store.mirror_of is not None:
        raise UserError(
            f"{store.root} is the local folder of the store {store.mirror_of}",
            f"name the store itself: {store.mirror_of}",
        )
    return store
