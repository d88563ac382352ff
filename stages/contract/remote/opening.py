"""Connecting to a store in a bucket, and to its local folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import uuid
from pathlib import Path

from stages.contract.disk import explain_disk_errors
from stages.contract.errors import StoreError, UserError
from stages.contract.remote.bucket import Bucket, Found, Version
from stages.contract.remote.errors import ConflictError
from stages.contract.store import FORMAT, MARKER


def check_marker(bucket: Bucket, *, create: bool) -> None:
    """Makes sure that the prefix is a store.

    Args:
        bucket: The bucket.
        create: Make an empty store where there is nothing yet.

    Raises:
        UserError: The prefix holds something else, or the storage cannot keep a store.
        StoreError: There is no store.
    """
    marker = bucket.get(MARKER)
    if marker is None and create:
        marker = _create(bucket)
    if marker is None:
        raise StoreError(
            f"no store at {bucket.url} ({bucket.endpoint}): it has no {MARKER}. Is that the right "
            "bucket, prefix and endpoint?"
        )
    found = json.loads(marker.data).get("format")
    if found != FORMAT:
        raise UserError(
            f"{bucket.url} is a store of format {found}; this version reads {FORMAT}",
            "use the version of geb that wrote it, or another store",
        )


def local_folder(bucket: Bucket, home: Path) -> Path:
    """The local folder of a store in a bucket, made where there is none yet."""
    # The same bucket name at another endpoint is another bucket.
    place = hashlib.sha256(f"{bucket.endpoint} {bucket.url}".encode()).hexdigest()[:12]
    name = re.sub(r"[^\w.-]+", "-", f"{bucket.name}-{bucket.prefix}").strip("-")
    root = home / f"{name}-{place}"
    marker = root / MARKER
    if not marker.exists():
        with explain_disk_errors(root):
            root.mkdir(parents=True, exist_ok=True)
            scratch = marker.with_suffix(f".{uuid.uuid4().hex[:8]}")
            # The id tells what this folder wrote in the bucket from what others did.
            facts = {"format": FORMAT, "mirror_of": bucket.url, "id": uuid.uuid4().hex}
            scratch.write_text(json.dumps(facts))
            with contextlib.suppress(FileExistsError):
                os.link(scratch, marker)
            scratch.unlink()
    return root


def folder_id(root: Path) -> str:
    """Identity of a local folder that :func:`local_folder` made."""
    return str(json.loads((root / MARKER).read_text())["id"])


def _create(bucket: Bucket) -> Found | None:
    if bucket.list(limit=1):
        raise UserError(
            f"{bucket.url} is not empty and holds no {MARKER}: it is not a store",
            "set `store` to a store or to an empty or new prefix",
        )
    with contextlib.suppress(ConflictError):
        bucket.put(MARKER, json.dumps({"format": FORMAT}).encode(), absent=True)
    _require_conditional_writes(bucket)
    return bucket.get(MARKER)


def _require_conditional_writes(bucket: Bucket) -> None:
    """Refuses a storage that ignores conditions: two hosts could then hold one lease.

    Raises:
        UserError: It does.
    """
    probe = f"probes/{uuid.uuid4().hex}"
    bucket.put(probe, b"1", absent=True)
    try:
        for absent, replaces in ((True, None), (False, Version(f'"{"0" * 32}"', "1"))):
            with contextlib.suppress(ConflictError):
                bucket.put(probe, b"2", absent=absent, replaces=replaces)
                raise UserError(
                    f"the storage at {bucket.endpoint} ignores If-None-Match or If-Match: two "
                    "hosts could compute one thing at once",
                    "use a storage with conditional writes (Amazon S3, a recent MinIO), "
                    "or a shared folder",
                )
    finally:
        bucket.delete([probe])
