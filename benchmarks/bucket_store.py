"""Cost of a store in a bucket: throughput of push and pull, and the price of a hit.

``python -m benchmarks.bucket_store`` starts an S3 server on loopback; with ``--store
s3://bucket/prefix`` the bucket of the AWS environment is measured instead (an empty prefix, which
is left empty).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from stages.contract.manifest import Manifest, describe_file
from stages.store.base import Artifact, Store
from stages.store.remote.store import RemoteStore
from tests.object_storage import BUCKET, aws_environment, make_bucket, s3_server

_MIB = 1 << 20


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bucket_store")
    parser.add_argument("--store", help="an empty prefix; a server on loopback without it")
    parser.add_argument("--mib", type=int, default=512, help="size of a large artifact")
    parser.add_argument("--files", type=int, default=4, help="its files")
    parser.add_argument("--hits", type=int, default=100, help="hits that are timed")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    with _bucket(options.store) as url, tempfile.TemporaryDirectory() as folder:
        rows = _measure(url, Path(folder), options.mib, options.files, options.hits)
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    print("| what | seconds | |\n| --- | ---: | --- |")
    for what, seconds, note in rows:
        print(f"| {what} | {seconds:.4g} | {note} |")


@contextlib.contextmanager
def _bucket(url: str | None) -> Iterator[str]:
    if url is not None:
        yield url
        return
    with s3_server() as port:
        os.environ |= aws_environment(port)
        make_bucket()
        yield f"s3://{BUCKET}/benchmark"


def _measure(
    url: str, folder: Path, mib: int, num_files: int, hits: int
) -> list[tuple[str, float, str]]:
    near = RemoteStore.connect(url, folder / "near", create=True)
    far = RemoteStore.connect(url, folder / "far")
    local = Store.open(str(folder / "local"), create=True)
    large = _make(near.local, mib * _MIB // num_files, num_files)
    small = _make(near.local, 1000, 3)
    in_folder = _make(local, 1000, 3)
    total = f"{mib} MiB in {num_files} files"

    def rate(what: str, act: Callable[[], object]) -> tuple[str, float, str]:
        seconds = _timed(act)
        return f"{what} {total}", seconds, f"{mib / seconds:.0f} MiB/s"

    def hit(store: Store, artifact: Artifact) -> float:
        manifest = artifact.manifest
        return (
            _timed(lambda: [store.load(manifest.stage, manifest.key) for _ in range(hits)]) / hits
        )

    rows = [rate("push", lambda: near.push(large))]
    near.push(small)
    manifest = large.manifest
    found = far.load(manifest.stage, manifest.key)
    assert found is not None
    rows.append(rate("pull, verified,", found.file))
    rows.append(("pull what is here already", _timed(found.file), "sizes and times compared"))
    rows.append(("hit, store in a bucket", hit(far, small), "two requests"))
    rows.append(("hit, store in a folder", hit(local, in_folder), ""))
    work = near.work("make", "key")
    shutil.copytree(large.path, near.local.work_path("make", "key"))
    rows.append(rate("snapshot of an attempt's state,", work.push))
    rows.append(("the same when nothing has changed", _timed(work.push), ""))
    for held in list(near.held()):
        near.remove(held)
    names = near.bucket.list()
    near.bucket.delete(names)
    return rows


def _make(store: Store, size: int, count: int) -> Artifact:
    """A published artifact of random files in the local folder."""
    key = uuid.uuid4().hex * 2
    scratch = store.new_scratch("make", key)
    for index in range(count):
        with (scratch / f"weights-{index}").open("wb") as file:
            for _ in range(0, size, _MIB):
                file.write(os.urandom(min(size, _MIB)))
    files = {path.name: describe_file(path, telemetry=False) for path in scratch.iterdir()}
    manifest = Manifest(
        stage="make",
        version="1",
        key=key,
        params={},
        seed=0,
        inputs={},
        run="",
        step="",
        files=files,
        started="",
        ended="",
        software={},
        host="",
        accelerator="cpu",
        notes={},
    )
    return store.publish(scratch, manifest)


def _timed(act: Callable[[], object]) -> float:
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
