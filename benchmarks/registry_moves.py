"""Registry of models in a bucket that several hosts change at once: no change may get lost.

``python -m benchmarks.registry_moves --changes 100`` starts an S3 server on loopback. Each host, a
process with a local folder of its own, registers checkpoints, sets an alias and rolls it back. One
of them may be killed amid a change (``--kills``) and starts again. Exit code 1 if a version or a
move that a host was told of is missing or doubled, or if the alias is not what its moves make.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from stages.contract.errors import ConflictError, UserError
from stages.contract.request import ArtifactInput
from stages.store.registry import ModelRegistry
from stages.store.remote.store import RemoteStore
from tests.object_storage import BUCKET, aws_environment, make_bucket, s3_server

_URL = f"s3://{BUCKET}/registry"
_MODEL, _ALIAS = "tiny", "production"


def _registry(folder: Path) -> ModelRegistry:
    return ModelRegistry(RemoteStore.connect(_URL, folder, create=True))


def _change(folder: Path, number: int, draw: random.Random) -> str:
    """Makes one change, as a command does; says which, or that there was nothing to change."""
    name = f"{folder.name}-{number}"
    registry = _registry(folder)
    if draw.random() < 0.3:
        made = ArtifactInput(stage="train", key=name, path="checkpoint", digest=name)
        return f"version {name} {registry.register(_MODEL, made, metrics={}).version}"
    try:
        if draw.random() < 0.3:
            moved = registry.rollback(_MODEL, _ALIAS, reason=name)
        else:
            version = draw.choice(registry.versions(_MODEL)).version
            moved = registry.set_alias(_MODEL, _ALIAS, version, reason=name)
    except UserError:
        return "nothing"
    return f"move {name}" if moved.history[-1].reason == name else "nothing"


def _host(folder: Path, changes: int) -> None:
    """Makes the changes that this host has not made yet; writes down each that has returned."""
    told = folder.with_suffix(".told")
    done = told.read_text().splitlines() if told.exists() else []
    with told.open("a") as file:
        for number in range(len(done), changes):
            # A killed attempt may have made this one: the next has another name.
            while True:
                with contextlib.suppress(ConflictError):
                    line = _change(folder, number + 1000 * os.getpid(), random.Random())
                    break
            file.write(line + "\n")
            file.flush()


def _wrong(folder: Path, told: list[str]) -> Iterator[str]:
    """Faults that a new host finds: entries missing, doubled or out of order."""
    registry = _registry(folder)
    versions = registry.versions(_MODEL)
    if [each.version for each in versions] != list(range(1, len(versions) + 1)):
        yield "versions are not numbered one by one"
    known = {f"version {each.checkpoint.key} {each.version}" for each in versions}
    alias = registry.alias(_MODEL, _ALIAS)
    moves = Counter(f"move {each.reason}" for each in alias.history)
    yield from (
        f"{each} is not there" for each in told if each[:7] == "version" and each not in known
    )
    yield from (
        f"{each}: {moves[each]} times" for each in told if each[:4] == "move" and moves[each] != 1
    )
    held: list[int] = []
    for move in alias.history:
        if move.action == "rollback":
            held.pop()
        else:
            held.append(move.version)
    if held != [*alias.previous, alias.version]:
        yield f"the moves lead to {held}, the alias has {[*alias.previous, alias.version]}"


def main() -> int:
    """Starts the hosts, which change the registry; returns 1 if a change got lost."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.registry_moves")
    parser.add_argument("--changes", type=int, default=100, help="of each host")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--kills", type=int, default=0)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name, s3_server() as port:
        os.environ |= aws_environment(port)
        make_bucket()
        folders = [Path(name) / f"host{number}" for number in range(options.hosts)]
        first = ArtifactInput(stage="train", key="first", path="checkpoint", digest="first")
        _registry(folders[0]).register(_MODEL, first, metrics={})
        started = time.monotonic()

        def start(folder: Path) -> multiprocessing.process.BaseProcess:
            process = context.Process(target=_host, args=(folder, options.changes))
            process.start()
            return process

        running = {folder: start(folder) for folder in folders}
        for _ in range(options.kills):
            time.sleep(random.uniform(5, 15))
            folder = random.choice(folders)
            running[folder].kill()
            running[folder].join()
            running[folder] = start(folder)
        for each in running.values():
            each.join()
        told = [
            line for each in folders for line in each.with_suffix(".told").read_text().split("\n")
        ]
        wrong = list(_wrong(Path(name) / "anew", told))
        made = Counter(each.partition(" ")[0] for each in told)
        print(
            f"{options.hosts} hosts, {options.kills} kills, {time.monotonic() - started:.0f} s: "
            f"{made['version']} versions and {made['move']} moves, {len(wrong)} wrong"
        )
        print("\n".join(wrong))
        return int(bool(wrong or any(each.exitcode for each in running.values())))


if __name__ == "__main__":
    sys.exit(main())
