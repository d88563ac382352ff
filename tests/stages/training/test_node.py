"""Nodes of a training, without workers: where they meet, who is first, how failures spread."""

import io
import subprocess
import sys
import time

import psutil
import pytest

from flows.standing.server import free_port
from stages.contract.errors import StageFailedError, UserError
from stages.contract.events import Emitter
from stages.contract.request import Resources
from stages.training.node import host, join

TWO = Resources(nodes=2)


@pytest.fixture(autouse=True)
def loopback(monkeypatch):
    """The first node's address."""
    monkeypatch.setenv("GEB_NODE_ADDRESS", "127.0.0.1")


def listening(port):
    """Addresses on which this process listens at a port."""
    return {
        connection.laddr.ip
        for connection in psutil.Process().net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
    }


def failure_of(node):
    while (error := node.failure()) is None:
        time.sleep(0.05)
    return error


def test_one_node_listens_on_loopback_only(tmp_path):
    node = host(tmp_path, Resources(processes=2), "")
    assert listening(node.store.port) == {"127.0.0.1"}
    assert node.failure() is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["192.0.2.1", "x" * 100], ids=["of another node", "no name"])
def test_a_place_that_is_not_this_node_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.setenv("GEB_NODE_ADDRESS", name)
    with pytest.raises(UserError, match=f"cannot listen for the other nodes on {name}:0") as caught:
        host(tmp_path, Resources(nodes=2), "")
    assert "GEB_NODE_ADDRESS" in caught.value.remedy


def test_the_first_node_has_rank_0_and_a_failure_reaches_the_other(tmp_path):
    first = host(tmp_path, TWO, "")
    # An address given as such is the only one that is listened on.
    assert listening(first.store.port) == {"127.0.0.1"}
    second = join(tmp_path)
    assert (first.rank, second.rank) == (0, 1)
    first.start()
    second.start()
    assert first.failure() is None
    first.close(StageFailedError("no luck"))
    error = failure_of(second)
    assert isinstance(error, StageFailedError)
    assert str(error) == "another node failed: no luck"
    # A node too many.
    events = io.StringIO()
    join(tmp_path).train(Emitter(events))
    assert "training started without need of this node" in events.getvalue()


def test_a_mistake_that_another_node_found_arrives_with_its_remedy(tmp_path):
    first = host(tmp_path, TWO, "")
    second = join(tmp_path)
    first.start()
    second.start()
    second.close(UserError("a batch is too long", "lower micro_batch_tokens"))
    error = failure_of(first)
    assert isinstance(error, UserError)
    assert error.message == "a batch is too long"
    assert error.remedy == "lower micro_batch_tokens"


@pytest.mark.parametrize("form", ["::1", "[::1]", "[::1]:{port}"])
def test_nodes_meet_at_an_address_of_version_6(tmp_path, monkeypatch, form):
    port = free_port()
    monkeypatch.setenv("GEB_NODE_ADDRESS", form.format(port=port))
    first = host(tmp_path, TWO, "")
    assert listening(first.store.port) == {"::1"}
    assert (first.store.port == port) == ("port" in form)
    assert join(tmp_path).rank == 1


def test_an_option_is_not_awaited_as_a_folder():
    done = subprocess.run(
        [sys.executable, "-m", "stages.training.node", "--help"],
        stdout=subprocess.PIPE,
        timeout=60,
        text=True,
    )
    assert "usage: python -m stages.training.node WORK" in done.stdout


@pytest.mark.parametrize("closed", [0, 1], ids=["first", "second"])
def test_a_silent_node_is_missed(tmp_path, monkeypatch, closed):
    nodes = [host(tmp_path, TWO, ""), join(tmp_path)]
    for node in nodes:
        node.start()
    monkeypatch.setattr("stages.training.node.SILENT_SECONDS", 6)
    while any(at > time.monotonic() for at in nodes[1 - closed].heard_at.values()):
        time.sleep(0.05)
    nodes[closed].close()
    assert "1 of 2 nodes gave no sign for 6 s" in str(failure_of(nodes[1 - closed]))
