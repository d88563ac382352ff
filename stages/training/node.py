"""A node of a training: meets the other nodes, starts a worker for each device, watches them all.

The first node's stage hosts a store of torch. The workers read the stage call there. The nodes give
signs of life there and report why training failed. As soon as one worker of any node fails, every
node ends all its workers. The store's address reaches other nodes through the work folder.

``python -m stages.training.node WORK`` is another node, given the work folder of the first node's
stage, on a file system that both see. It waits for that stage, trains along with it, writes no
artifact, and ends when training ends.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

from torch.distributed import DistNetworkError, DistStoreError, TCPStore

from stages.contract.atomic import write_atomically
from stages.contract.errors import (
    EXIT_OK,
    EXIT_STOPPED,
    StageFailedError,
    StoppedError,
    UserError,
)
from stages.contract.events import Emitter, Failure, parse_event
from stages.contract.request import Resources
from stages.harness.program import deferred_stop, run_program

ADDRESS_VARIABLE = "GEB_NODE_ADDRESS"
"""Environment variable with the first node's address for the others, and optionally a port."""
MEETING_SECONDS = 600.0
"""Seconds that nodes wait for each other before training starts."""
SILENT_SECONDS = 30.0
"""Seconds without a sign of life after which a node is treated as lost."""
_LOOK_SECONDS = 0.1
_BEAT_SECONDS = 1.0
_FILE = "rendezvous.json"
_LOST = (DistNetworkError, DistStoreError)


class Node:
    """One node of a training.

    ``store`` is a connection to the first node's store. ``rank`` counts the nodes in the order of
    arrival; the first node has 0.
    """

    def __init__(self, resources: Resources, store: TCPStore, rank: int) -> None:
        self.resources = resources
        self.store = store
        self.rank = rank
        self._error: Exception | None = None
        self._closed = threading.Event()
        self._signs = dict.fromkeys(range(resources.nodes), 0)
        # No sign is missed while the nodes may still come.
        may_come = time.monotonic() + MEETING_SECONDS - SILENT_SECONDS
        self.heard_at = dict.fromkeys(self._signs, may_come)
        self._thread = threading.Thread(target=self._beat, name="beat", daemon=True)

    def train(self, events: Emitter) -> None:
        """Starts this node's workers and waits for them; for a process's main thread.

        Raises:
            UserError: A worker of any node found parameters, models or data wrong, or lacked
                memory.
            StoppedError: SIGTERM came; the workers have saved a checkpoint.
            StageFailedError: A worker failed, here or on another node, or a node did not come.
        """
        if self.rank >= self.resources.nodes:
            events.info("training started without need of this node")
            return
        self.start()
        with deferred_stop() as stop_requested:
            workers = [_Worker(self, number, events) for number in range(self.resources.devices)]
            failure = None
            try:
                self._watch(workers, stop_requested)
            except Exception as error:
                failure = error
                raise
            finally:
                for worker in workers:
                    worker.end()
                self.close(failure)

    def start(self) -> None:
        """Starts to give signs of life, if there are other nodes."""
        if self.resources.nodes > 1:
            self._thread.start()

    def failure(self) -> Exception | None:
        """The error by which the nodes cannot go on: another one reported it, or is silent."""
        if self._error is not None or self.resources.nodes == 1:
            return self._error
        now = time.monotonic()
        # Read here and not in the thread, which waits for a store that does not answer.
        silent = sum(now - at > SILENT_SECONDS for at in self.heard_at.values())
        if not silent:
            return None
        return StageFailedError(
            f"{silent} of {self.resources.nodes} nodes gave no sign for {SILENT_SECONDS:g} s, or "
            f"did not come in {MEETING_SECONDS:g} s; `python -m stages.training.node WORK` starts "
            "one, with this stage's work folder"
        )

    def close(self, failure: Exception | None = None) -> None:
        """Reports to the others why this node failed, if it did."""
        self._error = self._error or failure
        self._closed.set()
        if self.resources.nodes > 1:
            # A store that does not answer must not hold this process up.
            self._thread.join(5 * _BEAT_SECONDS)
            if self.rank == 0:
                # The store ends with the first node: the others read the reason before.
                time.sleep(3 * _BEAT_SECONDS)

    def _beat(self) -> None:
        """Gives signs of life, and looks for the other nodes' signs and for a failure."""
        # Without the first node's store the others fall silent.
        with contextlib.suppress(*_LOST):
            while not self._closed.wait(_BEAT_SECONDS):
                self.store.add(f"sign-{self.rank}", 1)
                for rank, before in self._signs.items():
                    self._signs[rank] = self.store.add(f"sign-{rank}", 0)
                    if self._signs[rank] != before:
                        self.heard_at[rank] = time.monotonic()
                if self.store.check(["failed"]):
                    failure = Failure.model_validate_json(self.store.get("failed"))
                    self._error = _error_of(failure, "another node")
                    return
            if self._error is not None:
                self.store.set("failed", _report_of(self._error).model_dump_json())

    def _mistake(self) -> UserError | None:
        """A mistake that another node reports soon: its end broke the connections here."""
        deadline = time.monotonic() + 3 * _BEAT_SECONDS
        while self.resources.nodes > 1 and time.monotonic() < deadline:
            failure = self.failure()
            if failure is not None:
                return failure if isinstance(failure, UserError) else None
            time.sleep(_LOOK_SECONDS)
        return None

    def _watch(self, workers: Sequence[_Worker], stop_requested: Callable[[], bool]) -> None:
        """Waits for the end of the workers; raises why training failed."""
        is_forwarded = False
        while True:
            codes = [worker.process.poll() for worker in workers]
            failures = [
                worker.failure_of(code)
                for worker, code in zip(workers, codes, strict=True)
                if code not in (None, EXIT_OK, EXIT_STOPPED)
            ]
            is_over = None not in codes
            elsewhere = self.failure()
            if is_over or failures or elsewhere:
                if stop_requested() or EXIT_STOPPED in codes:
                    raise StoppedError("asked to stop (SIGTERM)")
                if failures:
                    # Other failures follow from the first one, and from a user's mistake.
                    _, first = min(
                        failures,
                        key=lambda failure: (not isinstance(failure[1], UserError), failure[0]),
                    )
                    raise first if isinstance(first, UserError) else self._mistake() or first
                if elsewhere and not is_over:
                    raise elsewhere
                return
            if stop_requested() and not is_forwarded:
                is_forwarded = True
                for worker in workers:
                    worker.process.terminate()
            time.sleep(_LOOK_SECONDS)


class _Worker:
    """A worker process of this node, and a thread that reads its events."""

    def __init__(self, node: Node, local_rank: int, events: Emitter) -> None:
        per_node = node.resources.devices
        self._rank = node.rank * per_node + local_rank
        self._world_size = node.resources.world_size
        environment = {
            "RANK": str(self._rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(self._world_size),
            "LOCAL_WORLD_SIZE": str(per_node),
            "MASTER_ADDR": node.store.host,
            "MASTER_PORT": str(node.store.port),
        }
        self._failure: tuple[float, Failure] | None = None
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "stages.training.worker", str(os.getpid())],
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read, args=(events,), daemon=True)
        self._reader.start()

    def failure_of(self, code: int) -> tuple[float, Exception]:
        """When and why it failed, given its exit code."""
        self._reader.join(_BEAT_SECONDS)
        ended = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        # A killed one reports nothing; the others then lost their connection.
        at, failure = self._failure or (0.0, Failure(kind="crash", message=ended))
        return at, _error_of(failure, f"training process {self._rank} of {self._world_size}")

    def end(self) -> None:
        """Kills the process; after a failure it waits in a collective."""
        self.process.kill()
        self.process.wait()
        # What the process left behind may still hold its stdout.
        self._reader.join(_BEAT_SECONDS)

    def _read(self, events: Emitter) -> None:
        """Notes when and why it failed, and repeats how far the first worker is."""
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                event = parse_event(line)
                if isinstance(event, Failure):
                    self._failure = time.monotonic(), event
                elif event is not None and self._rank == 0:
                    # On a full disk a line of progress is lost, and no failure.
                    with contextlib.suppress(OSError):
                        events.emit(event)


def _report_of(error: Exception) -> Failure:
    if isinstance(error, UserError):
        return Failure(kind="user", message=error.message, remedy=error.remedy)
    return Failure(kind="crash", message=str(error))


def _error_of(failure: Failure, name: str) -> Exception:
    """The error of the process or node ``name`` that reported ``failure``."""
    if failure.kind == "user":
        return UserError(failure.message, failure.remedy)
    return StageFailedError(f"{name} failed: {failure.message}")


def host(work: Path, resources: Resources, call: str) -> Node:
    """The first node, with the store: without other nodes it listens on loopback only.

    All nodes see the folder ``work``. The others reach this one by its host name or the address in
    ``GEB_NODE_ADDRESS``. Workers read the ``call``.
    """
    address = os.environ.get(ADDRESS_VARIABLE) or socket.gethostname()
    if resources.nodes == 1:
        address = "127.0.0.1"
    separator = ":" if address.count(":") < 2 else "]:"
    name, _, requested = address.partition(separator)
    name = name.strip("[]")
    listener = _listen(name, requested or "0")
    port = listener.getsockname()[1]
    # Without a socket of ours the store would listen on all interfaces.
    store = TCPStore(
        name,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    attempt = uuid.uuid4().hex
    store.set("call", call)
    store.set("resources", resources.model_dump_json())
    store.set("attempt", attempt)
    if resources.nodes > 1:
        place = {"host": name, "port": port, "attempt": attempt}
        write_atomically(work / _FILE, json.dumps(place))
    return Node(resources, store, rank=0)


def join(work: Path) -> Node:
    """Another node, once the store is there of the first, whose stage has this work folder."""
    path = work / _FILE
    deadline = time.monotonic() + MEETING_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError, *_LOST):
            place = json.loads(path.read_text())
            store = TCPStore(
                place["host"], place["port"], is_master=False, timeout=timedelta(seconds=5)
            )
            # An attempt that was killed may have left the file, and its port to another program.
            if store.get("attempt").decode() == place["attempt"]:
                resources = Resources.model_validate_json(store.get("resources"))
                return Node(resources, store, rank=store.add("tickets", 1))
        time.sleep(_BEAT_SECONDS)
    raise StageFailedError(f"no first node came to {path} in {MEETING_SECONDS:g} s")


def _listen(host: str, port: str) -> socket.socket:
    try:
        if ":" in host:
            return socket.create_server((host, int(port)), family=socket.AF_INET6)
        address = socket.gethostbyname(host)
        # A name that leads to loopback here leads to another address elsewhere.
        is_local_name = host != address and ipaddress.ip_address(address).is_loopback
        return socket.create_server(("" if is_local_name else address, int(port)))
    except (OSError, ValueError, OverflowError) as error:
        raise UserError(
            f"cannot listen for the other nodes on {host}:{port}: {error}",
            f"set {ADDRESS_VARIABLE} to an address of the first node, to address:port, or to "
            "[address]:port for IPv6",
        ) from error


def _take_part(events: Emitter) -> None:
    work = sys.argv[-1]
    if len(sys.argv) != 2 or work.startswith("-"):
        raise UserError("usage: python -m stages.training.node WORK")
    node = join(Path(work))
    events.info(f"joins {node.resources.nodes} nodes at {node.store.host}")
    node.train(events)


if __name__ == "__main__":
    run_program(_take_part)
