"""Where the processes of a training meet, on one node or on several.

The first node's stage hosts a store (torch's TCPStore) and, where there are more nodes, writes its
address into the work folder, which all nodes share. The other nodes read it there and join.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import struct
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch.distributed import DistNetworkError, DistStoreError, TCPStore

from stages.contract.errors import StageFailedError, UserError

LOOPBACK = "127.0.0.1"
POLL_SECONDS = 0.2
CONNECT_TIMEOUT = timedelta(seconds=5)
TIMEOUT_SECONDS = 600.0
"""How long nodes wait for each other before training starts."""
_FILE = "rendezvous.json"
# Linux: the call that gives an interface's address, and how long its name may be.
_SIOCGIFADDR = 0x8915
_NAME_BYTES = 15
_LOST = (DistNetworkError, DistStoreError)


@dataclass
class Rendezvous:
    """One node's place among the processes of a training.

    Attributes:
        store: Connection to the first node's store.
        host: Address of the first node, as this node reaches it.
        node: This node, from 0.
        num_nodes: Nodes.
        per_node: Processes of each.
    """

    store: TCPStore
    host: str
    node: int
    num_nodes: int
    per_node: int

    @property
    def world_size(self) -> int:
        """Processes of all nodes."""
        return self.num_nodes * self.per_node

    def environment(self, local_rank: int) -> dict[str, str]:
        """Variables that tell a worker process who it is and where to meet the others."""
        variables = {
            "RANK": str(self.node * self.per_node + local_rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.per_node),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.store.port),
            # torch then connects to the store of the first node's stage in place of making one.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        interface = interface_towards(self.host) if self.num_nodes > 1 else None
        if interface is not None:
            # Otherwise both take the address that the host's name stands for, often loopback.
            for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                variables[name] = os.environ.get(name, interface)
        return variables

    def tell_failure(self, message: str) -> None:
        """Makes the other nodes end, too."""
        with contextlib.suppress(*_LOST):
            self.store.set("failed", message)

    def failure(self) -> str | None:
        """What another node said when it failed; also that the first one is gone."""
        if self.num_nodes == 1:
            return None
        try:
            return self.store.get("failed").decode() if self.store.check(["failed"]) else None
        except _LOST:
            return "the first node is gone"


@contextlib.contextmanager
def host_rendezvous(
    work: Path,
    *,
    address: str,
    num_nodes: int,
    per_node: int,
    waiting: Callable[[int], None],
    check_stop: Callable[[], None],
) -> Iterator[Rendezvous]:
    """The first node's side: hosts the store and waits until all nodes are there.

    Args:
        work: The stage's work folder, on a file system that all nodes see.
        address: ``host:port`` at which the other nodes reach this one; empty for this host's name
            and any free port.
        num_nodes: Nodes.
        per_node: Processes of each.
        waiting: Called once with the number of nodes that are still to come.
        check_stop: Called while waiting; raises to give up.

    Raises:
        StageFailedError: They did not come in time.
        UserError: The address cannot be listened on.
    """
    path = work / _FILE
    path.unlink(missing_ok=True)
    host, port = _parse(address) if num_nodes > 1 else (LOOPBACK, 0)
    try:
        store = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=TIMEOUT_SECONDS),
        )
    except _LOST as error:
        raise UserError(
            f"resources.rendezvous: cannot listen on {host}:{port}: {error}",
            "give a free port of the first node, or leave it empty",
        ) from error
    rendezvous = Rendezvous(store, host, 0, num_nodes, per_node)
    if num_nodes == 1:
        yield rendezvous
        return
    attempt = uuid.uuid4().hex
    store.set("attempt", attempt)
    temporary = path.with_suffix(".partial")
    found = {"host": host, "port": store.port, "attempt": attempt}
    temporary.write_text(json.dumps(found | {"num_nodes": num_nodes, "per_node": per_node}))
    temporary.rename(path)
    try:
        _await_nodes(rendezvous, waiting, check_stop)
        yield rendezvous
    finally:
        path.unlink(missing_ok=True)


def join_rendezvous(work: Path, *, check_stop: Callable[[], None]) -> Rendezvous:
    """Another node's side: waits for the first node and takes a place.

    Args:
        work: The stage's work folder.
        check_stop: Called while waiting; raises to give up.

    Raises:
        StageFailedError: The first node did not come in time.
    """
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        check_stop()
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


def _await_nodes(
    rendezvous: Rendezvous, waiting: Callable[[int], None], check_stop: Callable[[], None]
) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    wanted = rendezvous.num_nodes - 1
    waiting(wanted)
    while (come := rendezvous.store.add("nodes", 0)) < wanted:
        check_stop()
        if time.monotonic() > deadline:
            raise StageFailedError(
                f"{come} of {wanted} other nodes came in {TIMEOUT_SECONDS:g} s; start "
                "`python -m stages.train.node WORK` on each, with this stage's work folder"
            )
        time.sleep(POLL_SECONDS)


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
        node = store.add("nodes", 1)
    except _LOST:
        return None
    store.set_timeout(timedelta(seconds=TIMEOUT_SECONDS))
    if node >= found["num_nodes"]:
        raise UserError(
            f"this is node {node + 1} of a training on {found['num_nodes']}",
            "start one process of stages.train.node fewer, or raise resources.nodes",
        )
    return Rendezvous(store, found["host"], node, found["num_nodes"], found["per_node"])


def _parse(address: str) -> tuple[str, int]:
    if not address:
        return socket.gethostname(), 0
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(
            f"resources.rendezvous is {address!r}", "give the first node's host:port, or leave it"
        )
    return host, int(port)
