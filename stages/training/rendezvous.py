"""Meeting of a training's nodes on one store of torch, which the first node's stage hosts.

If there are more nodes, the store's address goes through the work folder, which all of them see.
Every node beats on the store from then on, so that the others notice when it is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import itertools
import json
import os
import socket
import struct
import threading
import time
import uuid
from collections.abc import Iterator
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
"""A node without a beat for so long is treated as dead."""
_BEAT_SECONDS = 1.0
# A node that is to take part must have beaten in the last seconds.
_FRESH_SECONDS = 4.0
# The first node waits so long for the others to read why training ended.
_FAREWELL_SECONDS = 10.0
_CONNECT_TIMEOUT = timedelta(seconds=5)
_FILE = "rendezvous.json"
# Linux: the call that gives an interface's address, and how long its name may be.
_SIOCGIFADDR = 0x8915
_NAME_BYTES = 15
_LOST = (DistNetworkError, DistStoreError)


class Rendezvous:
    """One node's connection to the others of a training.

    Args:
        store: Connection to the first node's store.
        host: Address of the first node, as this node reaches it.
        num_nodes: Nodes.
        per_node: Processes of each.
        ticket: Number of this node in the order of arrival; the first node has 0.

    Attributes:
        rank: Number of this node among those that train, known once they met.
    """

    def __init__(
        self, store: TCPStore, host: str, num_nodes: int, per_node: int, ticket: int
    ) -> None:
        self.store = store
        self.host = host
        self.num_nodes = num_nodes
        self.per_node = per_node
        self.rank = 0
        self._ticket = ticket
        self._others: list[int] = []
        self._heard: dict[int, tuple[bytes, float]] = {}
        self._said: str | None = None
        self._answered_at = time.monotonic()
        self._closed = threading.Event()
        if num_nodes > 1:
            threading.Thread(target=self._beat, name="beat", daemon=True).start()

    @property
    def world_size(self) -> int:
        """Processes of all nodes."""
        return self.num_nodes * self.per_node

    def meet(self) -> bool:
        """Waits until all nodes are there; false for a node that is one too many.

        Raises:
            StageFailedError: They did not come in time, or one is gone.
        """
        if self.num_nodes == 1:
            return True
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while (places := self._places()) is None:
            if self._said is not None:
                raise StageFailedError(f"the rendezvous of the nodes failed: {self._said}")
            if time.monotonic() > deadline:
                raise StageFailedError(
                    f"fewer than {self.num_nodes} nodes came in {TIMEOUT_SECONDS:g} s; start "
                    "`python -m stages.training.node WORK` on each other one, with this stage's "
                    "work folder"
                )
            time.sleep(POLL_SECONDS)
        if self._ticket not in places:
            return False
        self.rank = places.index(self._ticket)
        now = time.monotonic()
        self._heard |= dict.fromkeys(places, (b"", now))
        self._others = [ticket for ticket in places if ticket != self._ticket]
        return True

    def failure(self) -> str | None:
        """Reason why the nodes cannot go on: what another one said, or that one is silent."""
        if self._said is not None:
            return self._said
        now = time.monotonic()
        silent = [each for each in self._others if now - self._heard[each][1] > SILENT_SECONDS]
        return (
            f"{len(silent)} other nodes gave no sign for {SILENT_SECONDS:g} s" if silent else None
        )

    def close(self, failure: str = "") -> None:
        """Leaves the meeting; the first node, which hosts the store, leaves last.

        Args:
            failure: Why this node ends, for the others; empty if it trained to the end.
        """
        # A store that does not answer would hold this process up.
        late = time.monotonic() - self._answered_at > _FRESH_SECONDS
        if self._others and not late:
            with contextlib.suppress(*_LOST):
                if failure and self._said is None:
                    self.store.set("failed", failure)
                if self.rank:
                    self.store.add("left", 1)
                else:
                    self._await_farewell()
        self._closed.set()

    def _await_farewell(self) -> None:
        """Gives the other nodes time to read why training ended."""
        deadline = time.monotonic() + _FAREWELL_SECONDS
        while self.store.add("left", 0) < len(self._others) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)

    def _places(self) -> list[int] | None:
        """Tickets of the nodes that train, by rank, once the first node has chosen them."""
        try:
            if self._ticket == 0:
                now = time.monotonic()
                fresh = [
                    ticket
                    for ticket, (_, at) in sorted(self._heard.items())
                    if now - at < _FRESH_SECONDS
                ]
                self._others = list(range(1, self.store.add("tickets", 0) + 1))
                if len(fresh) < self.num_nodes - 1:
                    return None
                self.store.set("places", json.dumps([0, *fresh[: self.num_nodes - 1]]))
            if not self.store.check(["places"]):
                return None
            places: list[int] = json.loads(self.store.get("places"))
        except _LOST as error:
            raise StageFailedError(f"the rendezvous of the nodes failed: {error}") from error
        return places

    def _beat(self) -> None:
        """Gives signs of life, and looks for the other nodes' signs."""
        try:
            for number in itertools.count():
                self.store.set(f"beat-{self._ticket}", str(number))
                for ticket in self._others:
                    name = f"beat-{ticket}"
                    beat = self.store.get(name) if self.store.check([name]) else b""
                    if beat and beat != self._heard.get(ticket, (b"", 0.0))[0]:
                        self._heard[ticket] = (beat, time.monotonic())
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
    rendezvous = Rendezvous(store, host, num_nodes, per_node, ticket=0)
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


def _try_to_join(path: Path) -> Rendezvous | None:
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    try:
        store = TCPStore(found["host"], found["port"], is_master=False, timeout=_CONNECT_TIMEOUT)
        # The file may be that of an attempt that was killed, the port by now another program's.
        if store.get("attempt").decode() != found["attempt"]:
            return None
        ticket = store.add("tickets", 1)
    except _LOST:
        return None
    return Rendezvous(store, found["host"], found["num_nodes"], found["per_node"], ticket)


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
