"""Meeting of a training's nodes on one store of torch, which the first node's stage hosts.

If there are more nodes, the store's address goes through the work folder, which all of them see.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from torch.distributed import DistNetworkError, DistStoreError, TCPStore

from stages.contract.atomic import write_atomically
from stages.contract.errors import StageFailedError, UserError

LOOPBACK = "127.0.0.1"
POLL_SECONDS = 0.2
ADDRESS_VARIABLE = "GEB_NODE_ADDRESS"
"""Environment variable with this node's address, for a host name that leads nowhere."""
TIMEOUT_SECONDS = 600.0
"""Seconds that nodes wait for each other before training starts."""
SILENT_SECONDS = 30.0
"""Seconds without a sign of life after which a node is treated as lost."""
_BEAT_SECONDS = 1.0
# A store that answered so lately can be spoken to.
_FRESH_SECONDS = 4.0
# The first node waits so long for the others to read why training ended.
_FAREWELL_SECONDS = 10.0
_CONNECT_TIMEOUT = timedelta(seconds=5)
_FILE = "rendezvous.json"
_LOST = (DistNetworkError, DistStoreError)


@dataclass
class Rendezvous:
    """One node's connection to the others of a training.

    Attributes:
        store: Connection to the first node's store.
        host: Address of the first node, as this node reaches it.
        num_nodes: Nodes.
        per_node: Processes of each.
        rank: Number of this node in the order of arrival; the first node has 0.
    """

    store: TCPStore
    host: str
    num_nodes: int
    per_node: int
    rank: int
    _heard: dict[int, tuple[bytes, float]] = field(default_factory=dict)
    _said: str | None = None
    _answered_at: float = field(default_factory=time.monotonic)
    _closed: threading.Event = field(default_factory=threading.Event)

    @property
    def world_size(self) -> int:
        """Processes of all nodes."""
        return self.num_nodes * self.per_node

    def meet(self) -> bool:
        """Waits until all nodes are there; false for a node that is one too many."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        try:
            while self.num_nodes > 1 and self.store.add("tickets", 0) < self.num_nodes - 1:
                if time.monotonic() > deadline:
                    raise StageFailedError(
                        f"fewer than {self.num_nodes} nodes came in {TIMEOUT_SECONDS:g} s; start "
                        "`python -m stages.training.node WORK` on each other one, with this "
                        "stage's work folder"
                    )
                time.sleep(POLL_SECONDS)
        except _LOST as error:
            raise StageFailedError(f"the rendezvous of the nodes failed: {error}") from error
        if self.rank >= self.num_nodes:
            return False
        now = time.monotonic()
        self._heard = {rank: (b"", now) for rank in range(self.num_nodes) if rank != self.rank}
        if self._heard:
            threading.Thread(target=self._beat, name="beat", daemon=True).start()
        return True

    def failure(self) -> str | None:
        """Reason why the nodes cannot go on: what another one said, or that one is silent."""
        if self._said is not None:
            return self._said
        now = time.monotonic()
        # Read here and not in the thread, which waits for a store that does not answer.
        silent = sum(now - at > SILENT_SECONDS for _, at in self._heard.values())
        return f"{silent} other nodes gave no sign for {SILENT_SECONDS:g} s" if silent else None

    def close(self, failure: str = "") -> None:
        """Leaves the meeting; the first node, which hosts the store, leaves last.

        Args:
            failure: Why this node ends, for the others; empty if it trained to the end.
        """
        # A store that does not answer would hold this process up.
        answers = time.monotonic() - self._answered_at < _FRESH_SECONDS
        if self._heard and answers:
            with contextlib.suppress(*_LOST):
                if failure and self._said is None:
                    self.store.set("failed", failure)
                gone = self.store.add("left", 1)
                deadline = time.monotonic() + _FAREWELL_SECONDS
                while self.rank == 0 and gone < self.num_nodes and time.monotonic() < deadline:
                    time.sleep(POLL_SECONDS)
                    gone = self.store.add("left", 0)
        self._closed.set()

    def _beat(self) -> None:
        """Gives signs of life, and looks for the other nodes' signs and for a failure."""
        try:
            for number in itertools.count():
                self.store.set(f"beat-{self.rank}", str(number))
                for rank, (before, _) in self._heard.items():
                    name = f"beat-{rank}"
                    beat = self.store.get(name) if self.store.check([name]) else before
                    if beat != before:
                        self._heard[rank] = (beat, time.monotonic())
                if self.store.check(["failed"]):
                    self._said = f"another node failed: {self.store.get('failed').decode()}"
                self._answered_at = time.monotonic()
                if self._closed.wait(_BEAT_SECONDS):
                    return
        except _LOST:
            self._said = "the first node is gone"


@contextlib.contextmanager
def host_rendezvous(
    work: Path, *, address: str, num_nodes: int, per_node: int
) -> Iterator[Rendezvous]:
    """The first node's side: hosts the store, on loopback if there is no other node.

    Args:
        work: The stage's work folder, on a file system that all nodes see.
        address: ``host:port`` at which the other nodes reach this one; empty for this host's name
            and any free port.
        num_nodes: Nodes.
        per_node: Processes of each.
    """
    path = work / _FILE
    path.unlink(missing_ok=True)
    if num_nodes == 1:
        address = f"{LOOPBACK}:0"
    elif not address:
        address = f"{os.environ.get(ADDRESS_VARIABLE) or socket.gethostname()}:0"
    host, _, asked = address.rpartition(":")
    listener = _listen(host, int(asked))
    port = listener.getsockname()[1]
    # Without a socket of ours the store would listen on all interfaces.
    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=TIMEOUT_SECONDS),
        master_listen_fd=listener.detach(),
    )
    attempt = uuid.uuid4().hex
    store.set("attempt", attempt)
    if num_nodes > 1:
        found = {"host": host, "port": port, "attempt": attempt}
        write_atomically(path, json.dumps(found | {"num_nodes": num_nodes, "per_node": per_node}))
    try:
        yield Rendezvous(store, host, num_nodes, per_node, rank=0)
    finally:
        path.unlink(missing_ok=True)


def join_rendezvous(work: Path) -> Rendezvous:
    """Another node's side: waits for the first node's store."""
    path = work / _FILE
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError, *_LOST):
            found = json.loads(path.read_text())
            host, port = found["host"], found["port"]
            store = TCPStore(host, port, is_master=False, timeout=_CONNECT_TIMEOUT)
            # The file may be that of an attempt that was killed, the port by now another program's.
            if store.get("attempt").decode() == found["attempt"]:
                rank = store.add("tickets", 1)
                return Rendezvous(store, host, found["num_nodes"], found["per_node"], rank)
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
