"""A node of a training: meets the other nodes, starts a worker for each device, watches them all.

The first node's stage hosts a store of torch. The workers read the stage call there; the nodes meet
there, give signs of life and say why training failed: as soon as one worker of any node fails,
every node ends all of its own. The store's address reaches other nodes through the work folder.

``python -m stages.training.node WORK`` is another node, given the work folder of the first node's
stage, on a file system that both see. It waits for that stage, trains along with it, writes no
artifact of its own, and ends when training ends.
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path

from torch.distributed import DistNetworkError, DistStoreError, TCPStore

from stages.contract.atomic import write_atomically
from stages.contract.errors import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_STOPPED,
    StageFailedError,
    StoppedError,
    UserError,
)
from stages.contract.events import Emitter, Failure
from stages.contract.request import Resources
from stages.harness.program import deferred_stop, run_program

POLL_SECONDS = 0.2
ADDRESS_VARIABLE = "GEB_NODE_ADDRESS"
"""Environment variable with this node's address, for a host name that leads nowhere."""
TIMEOUT_SECONDS = 600.0
"""Seconds that nodes wait for each other before training starts."""
SILENT_SECONDS = 30.0
"""Seconds without a sign of life after which a node is treated as lost."""
GRACE_SECONDS = 5.0
"""Seconds for workers to end after another one failed; they wait in a collective by then."""
_LOOK_SECONDS = 0.1
_BEAT_SECONDS = 1.0
# A store that answered so lately can be spoken to.
_FRESH_SECONDS = 4.0
# The first node waits so long for the others to read why training ended.
_FAREWELL_SECONDS = 10.0
_CONNECT_TIMEOUT = timedelta(seconds=5)
_FILE = "rendezvous.json"
_LOST = (DistNetworkError, DistStoreError)


@dataclass
class Node:
    """One node of a training."""

    resources: Resources
    store: TCPStore
    """Connection to the first node's store."""
    rank: int
    """Number of this node in the order of arrival; the first node has 0."""
    # Signs that each other node has given, and when the last one came.
    _heard: dict[int, tuple[int, float]] = field(default_factory=dict)
    _said: str | None = None
    _answered_at: float = field(default_factory=time.monotonic)
    _closed: threading.Event = field(default_factory=threading.Event)

    def train(self, events: Emitter) -> None:
        """Starts this node's workers and waits for them; for a process's main thread.

        Raises:
            UserError: A worker found parameters, models or data wrong, or lacked memory.
            StoppedError: SIGTERM came; the workers have saved a checkpoint.
            StageFailedError: A worker failed, here or on another node, or a node did not come.
        """
        if self.rank >= self.resources.nodes:
            events.info("training started without need of this node")
            return
        failure: BaseException | None = None
        try:
            self.meet()
            with deferred_stop() as stop:
                workers = [_Worker(self, each) for each in range(self.resources.devices)]
                try:
                    failure = self._watch(workers, stop, events)
                finally:
                    _end(workers)
        except BaseException as error:
            failure = failure or error
            raise
        finally:
            self.close("" if failure is None else str(failure) or type(failure).__name__)
        if failure is not None:
            raise failure

    def meet(self) -> None:
        """Waits until all nodes are there; they may not come in time, or the first one be gone."""
        num_nodes = self.resources.nodes
        deadline = time.monotonic() + TIMEOUT_SECONDS
        try:
            while self.store.add("tickets", 0) < num_nodes - 1:
                if time.monotonic() > deadline:
                    raise StageFailedError(
                        f"fewer than {num_nodes} nodes came in {TIMEOUT_SECONDS:g} s; start "
                        "`python -m stages.training.node WORK` on each other one, with this "
                        "stage's work folder"
                    )
                time.sleep(POLL_SECONDS)
        except _LOST as error:
            raise StageFailedError(f"the rendezvous of the nodes failed: {error}") from error
        now = time.monotonic()
        self._heard = {rank: (0, now) for rank in range(num_nodes) if rank != self.rank}
        if self._heard:
            threading.Thread(target=self._beat, name="beat", daemon=True).start()

    def failure(self) -> str | None:
        """Reason why the nodes cannot go on: what another one said, or that one is silent."""
        if self._said is not None:
            return self._said
        now = time.monotonic()
        # Read here and not in the thread, which waits for a store that does not answer.
        silent = sum(now - at > SILENT_SECONDS for _, at in self._heard.values())
        return f"{silent} other nodes gave no sign for {SILENT_SECONDS:g} s" if silent else None

    def close(self, failure: str = "") -> None:
        """Tells the others why this node failed, if it did; the first one leaves last."""
        # A store that does not answer would hold this process up.
        answers = time.monotonic() - self._answered_at < _FRESH_SECONDS
        if self._heard and answers:
            with contextlib.suppress(*_LOST):
                if failure and self._said is None:
                    self.store.set("failed", failure)
                gone = self.store.add("left", 1)
                deadline = time.monotonic() + _FAREWELL_SECONDS
                while (
                    self.rank == 0
                    and gone <= self._num_heard_lately()
                    and time.monotonic() < deadline
                ):
                    time.sleep(POLL_SECONDS)
                    gone = self.store.add("left", 0)
        self._closed.set()

    def _num_heard_lately(self) -> int:
        """Number of other nodes that have not fallen silent: a killed one reads nothing more."""
        now = time.monotonic()
        return sum(now - at < _FRESH_SECONDS for _, at in self._heard.values())

    def _beat(self) -> None:
        """Gives signs of life, and looks for the other nodes' signs and for a failure."""
        try:
            while not self._closed.is_set():
                self.store.add(f"beat-{self.rank}", 1)
                for rank, (before, _) in self._heard.items():
                    if (beat := self.store.add(f"beat-{rank}", 0)) != before:
                        self._heard[rank] = (beat, time.monotonic())
                if self.store.check(["failed"]):
                    self._said = f"another node failed: {self.store.get('failed').decode()}"
                self._answered_at = time.monotonic()
                self._closed.wait(_BEAT_SECONDS)
        except _LOST:
            self._said = "the first node is gone"

    def _watch(
        self, workers: Sequence[_Worker], stop: threading.Event, events: Emitter
    ) -> BaseException | None:
        """Waits for the end of the workers, and returns why training failed, if it did."""
        stopped = StoppedError("asked to stop (SIGTERM)")
        is_told = False
        while True:
            # Looked at first: what one said that has ended is in its pipe by now.
            codes = [worker.process.poll() for worker in workers]
            for worker in workers:
                worker.hear(events)
            failures = [
                worker.failure_of(code)
                for worker, code in zip(workers, codes, strict=True)
                if code not in (None, EXIT_OK, EXIT_STOPPED)
            ]
            if failures:
                # The failure that came by itself, rather than one that it dragged along.
                first = min(
                    failures, key=lambda each: (not isinstance(each[1], UserError), each[0])
                )
                return stopped if stop.is_set() else first[1]
            if None not in codes:
                return stopped if stop.is_set() or EXIT_STOPPED in codes else None
            if (elsewhere := self.failure()) is not None:
                return stopped if stop.is_set() else StageFailedError(elsewhere)
            if stop.is_set() and not is_told:
                is_told = True
                for worker in workers:
                    worker.signal(signal.SIGTERM)
            wait([each.connection for each in workers if not each.connection.closed], _LOOK_SECONDS)


class _Worker:
    """A worker process of this node, in a session of its own, and the pipe in which it speaks."""

    def __init__(self, node: Node, local_rank: int) -> None:
        per_node = node.resources.devices
        self._environment = {
            "RANK": str(node.rank * per_node + local_rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(node.resources.world_size),
            "LOCAL_WORLD_SIZE": str(per_node),
            "MASTER_ADDR": node.store.host,
            "MASTER_PORT": str(node.store.port),
        }
        self._failure: tuple[float, Failure] | None = None
        self.connection, other = Pipe(duplex=False)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "stages.training.worker", str(os.getpid())],
            env=os.environ | self._environment,
            stdout=other.fileno(),
            start_new_session=True,
        )
        other.close()

    def hear(self, events: Emitter) -> None:
        """Repeats the events that it has sent, and notes when and why it failed."""
        try:
            while not self.connection.closed and self.connection.poll():
                at, said = self.connection.recv()
                if isinstance(said, Failure):
                    self._failure = self._failure or (at, said)
                else:
                    events.emit(said)
        except (EOFError, OSError):
            self.connection.close()

    def failure_of(self, code: int) -> tuple[float, Exception]:
        """When and why it failed, given its exit code."""
        ended = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        # One that was killed had no time to say so; the others then lost their connection.
        at, said = self._failure or (0.0, Failure(kind="crash", message=ended))
        if said.kind == "user":
            return at, UserError(said.message, said.remedy)
        named = "training process {RANK} of {WORLD_SIZE} failed".format_map(self._environment)
        return at, StageFailedError(f"{named}: {said.message}")

    def signal(self, number: int) -> None:
        """Sends a signal to it and to what it started."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)


def _end(workers: Sequence[_Worker]) -> None:
    """Ends what is left of the workers."""
    for worker in workers:
        worker.signal(signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    for worker in workers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(max(0.0, deadline - time.monotonic()))
    for worker in workers:
        worker.signal(signal.SIGKILL)
        worker.process.wait()
        worker.connection.close()


@contextlib.contextmanager
def host(work: Path, resources: Resources, call: str) -> Iterator[Node]:
    """The first node, with the store: on loopback if there is no other node.

    All nodes see the folder ``work``. Without a ``rendezvous`` the others reach this one by its
    name, at any free port. Workers read the ``call``.
    """
    path = work / _FILE
    path.unlink(missing_ok=True)
    own_name = os.environ.get(ADDRESS_VARIABLE) or socket.gethostname()
    address = resources.rendezvous or f"{own_name}:0"
    name, _, asked = ("127.0.0.1:0" if resources.nodes == 1 else address).rpartition(":")
    listener = _listen(name, int(asked))
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
        write_atomically(path, json.dumps({"host": name, "port": port, "attempt": attempt}))
    try:
        yield Node(resources, store, rank=0)
    finally:
        path.unlink(missing_ok=True)


def join(work: Path) -> Node:
    """Another node, once the store is there of the first, whose stage has this work folder."""
    path = work / _FILE
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError, *_LOST):
            found = json.loads(path.read_text())
            store = TCPStore(
                found["host"], found["port"], is_master=False, timeout=_CONNECT_TIMEOUT
            )
            # The file may be that of an attempt that was killed, the port by now another program's.
            if store.get("attempt").decode() == found["attempt"]:
                resources = Resources.model_validate_json(store.get("resources"))
                return Node(resources, store, rank=store.add("tickets", 1))
        time.sleep(POLL_SECONDS)
    raise StageFailedError(f"no first node came to {path} in {TIMEOUT_SECONDS:g} s")


def _listen(host: str, port: int) -> socket.socket:
    try:
        address = socket.gethostbyname(host)
        # A name that stands for loopback here only is another address elsewhere.
        is_local_name = host != address and ipaddress.ip_address(address).is_loopback
        return socket.create_server(("" if is_local_name else address, port))
    except (OSError, UnicodeError) as error:
        # UnicodeError: of a name that is none.
        raise UserError(
            f"cannot listen for the other nodes on {host}:{port}: {error}",
            "give an address and a free port of the first node as resources.rendezvous, or leave "
            f"it empty and set {ADDRESS_VARIABLE} where the node's own name leads nowhere",
        ) from error


def _take_part(events: Emitter) -> None:
    if len(sys.argv) != 2:
        raise UserError("usage: python -m stages.training.node WORK")
    try:
        node = join(Path(sys.argv[1]))
        events.info(f"joins {node.resources.nodes} nodes at {node.store.host}")
        node.train(events)
    except StageFailedError as error:
        # Without a traceback: what failed is a worker or another node, and its log has it.
        events.emit(Failure(kind="crash", message=str(error)))
        os._exit(EXIT_FAILED)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        run_program(_take_part)
