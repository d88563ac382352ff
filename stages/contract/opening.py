"""The marker of a store's folder: made with a new store, read when one is opened."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from stages.contract.atomic import write_atomically
from stages.contract.disk import explain_disk_errors
from stages.contract.errors import NoStoreError, UserError
from stages.contract.records import read_json_record
from stages.contract.store import FORMAT, MARKER


def read_marker(root: Path, *, create: bool) -> dict[str, Any]:
    """Content of the marker of the store in the folder ``root``.

    Args:
        root: Folder of the store.
        create: Make an empty store where there is nothing yet.

    Raises:
        UserError: The folder is no store, or one of another format.
        NoStoreError: There is no store.
    """
    marker = root / MARKER
    if create and not os.path.lexists(marker):
        _require_empty(root)
        with explain_disk_errors(root):
            write_atomically(marker, json.dumps({"format": FORMAT}))
    try:
        found = read_json_record(marker, _remedy_of_marker(root))
    except OSError as error:
        raise NoStoreError(
            f"no store at {root}: {error.strerror}. Is the path right, and the file system mounted?"
        ) from error
    if found.get("format") != FORMAT:
        raise UserError(
            f"{root} is a store of format {found.get('format')}; this version reads {FORMAT}",
            "use the version of geb that wrote it, or another store",
        )
    return found


def _require_empty(root: Path) -> None:
    """Refuses to make a store where something else is.

    Raises:
        UserError: It is.
    """
    if os.path.lexists(root) and not root.is_dir():
        raise UserError(
            f"{root} is no folder", "set `store` to a store or to an empty or new folder"
        )
    # One that another process makes just now is a store.
    if root.exists() and any(MARKER not in each.name for each in root.iterdir()):
        raise UserError(
            f"{root} is not empty and holds no {MARKER}: it is not a store",
            "set `store` to a store or to an empty or new folder",
        )


def _remedy_of_marker(root: Path) -> str:
    if (root / "artifacts").is_dir():
        return (
            f"remove it and write {json.dumps({'format': FORMAT})} in its place: `geb verify` then "
            "tells whether the artifacts are whole. In the cache of a store in a bucket "
            "(`GEB_CACHE`), remove the whole folder"
        )
    return "remove it; the next run makes an empty store"
