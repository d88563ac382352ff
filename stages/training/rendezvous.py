"""Meeting of a training's nodes: torch's c10d rendezvous on one store at a known address.

The first node's stage hosts the store (torch's TCPStore) and, where there are more nodes, writes
its address into the work folder, which all nodes share. The other nodes read it there and join.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import json
import os
import socket
import struct
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)

from stages.contract.atomic import write_atomically
from stages.contract.errors import StageFailedError, UserError

LOOPBACK = "127.0.0.1"
POLL_SECONDS = 0.2
CONNECT_TIMEOUT = timedelta(seconds=5)
ADDRESS_VARIABLE = "GEB_NODE_ADDRESS"
"""Environment variable with this node's address, where its host name leads nowhere."""
TIMEOUT_SECONDS = 600.0
"""Seconds that nodes wait for each other before training starts."""
HEARTBEAT_SECONDS = 5
MISSED_HEARTBEATS = 6
"""A node that misses so many is taken for gone."""
_FILE = "rendezvous.json"
# Linux: the call that gives an interface's address, and how long its name may be.
_SIOCGIFADDR = 0x8915
_NAME_BYTES = 15
_LOST = (DistNetworkError, DistStoreError, RendezvousError)


class OneStoreHandler(DynamicRendezvousHandler):
    """torch's handler, less a second store on a port of its own and less restarts of workers."""

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> Any:
        return self._store

    def num_nodes_waiting(self) -> int:
        """None: a node that comes late shall not restart the others' workers."""
        return 0

    def missing_nodes(self) -> int:
        """Nodes whose heartbeats have stopped, as of the last question to the store."""
        return self.settings.max_nodes - len(self._state_holder.state.participants)


@dataclass(frozen=True)
class Rendezvous:
    """One node's way to the others of a training.

    Attributes:
        handler: The agent's handler.
        store: Connection to the first node's store.
        host: Address of the first node, as this node reaches it.
        num_nodes: Nodes.
        per_node: Processes of each.
    """

    handler: OneStoreHandler
    store: TCPStore
    host: str
    num_nodes: int
    per_node: int

    @property
    def world_size(self) -> int:
        """Processes of all nodes."""
        return self.num_nodes * self.per_node

    def tell_failure(self, message: str) -> None:
        """Leaves the reason for the other nodes, which end when the rendezvous is closed."""
        with contextlib.suppress(*_LOST):
            self.store.set("failed", message)

    def failure(self) -> str | None:
        """Reason why the nodes cannot go on: the words of another one, or that one is gone."""
        if self.num_nodes == 1:
            return None
        try:
            if self.handler.is_closed():
                said = self.store.get("failed") if self.store.check(["failed"]) else b"it stopped"
                return f"another node failed: {said.decode()}"
        except _LOST:
            return "the first node is gone"
        missing = self.handler.missing_nodes()
        seconds = HEARTBEAT_SECONDS * MISSED_HEARTBEATS
        return f"{missing} other nodes gave no sign for {seconds} s" if missing else None

    def close(self) -> None:
        """Ends the meeting; the other nodes notice."""
        with contextlib.suppress(*_LOST):
            self.handler.shutdown()


@contextlib.contextmanager
def host_rendezvous(
    work: Path, *, address: str, num_nodes: int, per_node: int
) -> Iterator[Rendezvous]:
    """The first node's side: hosts the store, on loopback where there is no other node.

    Args:
        work: The stage's work folder, on a file system that all nodes see.
        address: ``host:port`` at which the other nodes reach this one; empty for this host's name
            and any free port.
        num_nodes: Nodes.
        per_node: Processes of each.

    Raises:
        UserError: The address cannot be listened on.
    """
    path = work / _FILE
    path.unlink(missing_ok=True)
    host, port = _parse(address) if num_nodes > 1 else (LOOPBACK, 0)
    listener = _listen(host, port)
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
    handler = _handler(store, attempt, num_nodes, is_first=True)
    rendezvous = Rendezvous(handler, store, host, num_nodes, per_node)
    if num_nodes == 1:
        yield rendezvous
        return
    found = {"host": host, "port": port, "attempt": attempt}
    write_atomically(path, json.dumps(found | {"num_nodes": num_nodes, "per_node": per_node}))
    try:
        yield rendezvous
    finally:
        path.unlink(missing_ok=True)


def join_rendezvous(work: Path) -> Rendezvous:
    """Another node's side: waits for the first node's store.

    Args:
        work: The stage's work folder.

    Raises:
        StageFailedError: The first node did not come in time.
    """
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        joined = _try_to_join(work / _FILE)
        if joined is not None:
            return joined
        time.sleep(POLL_SECONDS)
    raise StageFailedError(f"no first node came to {work / _FILE} in {TIMEOUT_SECONDS:g} s")


def interface_towards(host: str) -> str | None:
    """Name of the network interface whose address this node has towards ``host``."""
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        try:
            # Sends nothing; it only chooses the route.
            probe.connect((host, 9))
        except OSError:
            return None
        own = socket.inet_aton(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:_NAME_BYTES])
            # An interface without an address has none to compare.
            with contextlib.suppress(OSError):
                if fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24] == own:
                    return name
    return None


def _handler(store: Store, run_id: str, num_nodes: int, *, is_first: bool) -> OneStoreHandler:
    return OneStoreHandler.from_backend(
        run_id,
        store,
        C10dRendezvousBackend(store, run_id),
        min_nodes=num_nodes,
        max_nodes=num_nodes,
        # Ranks are in the order of these names: rank 0 belongs to the stage, which reports.
        local_addr="0-first" if is_first else f"1-{socket.gethostname()}",
        timeout=RendezvousTimeout(join=timedelta(seconds=TIMEOUT_SECONDS)),
        keep_alive_interval=HEARTBEAT_SECONDS,
        keep_alive_max_attempt=MISSED_HEARTBEATS,
    )


def _try_to_join(path: Path) -> Rendezvous | None:
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    try:
        store = TCPStore(found["host"], found["port"], is_master=False, timeout=CONNECT_TIMEOUT)
        # The file may be that of an attempt that was killed, the port by now another program's.
        if store.get("attempt").decode() != found["attempt"]:
            return None
    except _LOST:
        return None
    store.set_timeout(timedelta(seconds=TIMEOUT_SECONDS))
    handler = _handler(store, found["attempt"], found["num_nodes"], is_first=False)
    return Rendezvous(handler, store, found["host"], found["num_nodes"], found["per_node"])


def _parse(address: str) -> tuple[str, int]:
    if not address:
        return os.environ.get(ADDRESS_VARIABLE) or socket.gethostname(), 0
    host, _, port = address.rpartition(":")
    return host, int(port)


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((_own_address(host), port))
    except (OSError, UnicodeError) as error:
        # UnicodeError: of a name that is none.
        raise UserError(
            f"cannot listen for the other nodes on {host}:{port}: {error}",
            "give an address and a free port of the first node as resources.rendezvous, or leave "
            f"it empty and set {ADDRESS_VARIABLE} where the node's own name leads nowhere",
        ) from error


def _own_address(host: str) -> str:
    """The address to listen on: all of them for a name that stands for loopback here only."""
    address = socket.gethostbyname(host)
    is_name = host != address
    return "" if is_name and ipaddress.ip_address(address).is_loopback else address
