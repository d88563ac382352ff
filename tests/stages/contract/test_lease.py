import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest

from stages.contract.errors import LeaseLostError
from stages.store import locks as lease_module
from stages.store.locks import FileLease, exclusive_lock
from tests.flows.probes import wait_until

# Takes the lease given as an argument, prints a line, and holds it until its stdin ends.
_HOLDER = """
import sys
from pathlib import Path
from stages.store.locks import FileLease
with_lease = FileLease(Path(sys.argv[1]))
with_lease.acquire()
print("held", flush=True)
sys.stdin.read()
with_lease.release()
"""


def start_holder(path):
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


@pytest.fixture
def path(tmp_path):
    return tmp_path / "leases" / "key"


def test_a_free_lease_is_taken_at_once_and_freed(path):
    lease = FileLease(path)
    lease.acquire()
    assert FileLease(path).holder() is not None
    lease.release()
    assert FileLease(path).holder() is None
    assert list(path.parent.iterdir()) == [], "neither the lease nor the files of its locks"


def test_holders_that_remove_the_lock_s_file_exclude_each_other(path):
    inside = []

    def hold(number):
        for _ in range(200):
            with exclusive_lock(path):
                inside.append(number)
                os.sched_yield()
                assert inside.pop() == number
                assert inside == []
                path.unlink()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(hold, range(8)))
    assert not path.exists()


def test_a_second_process_waits_for_the_first(path):
    process = start_holder(path)
    seen = []
    waits = threading.Event()

    def waiting(holder):
        seen.append(holder.pid)
        waits.set()

    lease = FileLease(path)
    thread = threading.Thread(target=lease.acquire, kwargs={"waiting": waiting})
    thread.start()
    assert waits.wait(30)
    assert seen == [process.pid]
    assert thread.is_alive()
    process.communicate()
    thread.join(30)
    assert not thread.is_alive()
    lease.release()


def test_a_lease_ends_with_its_killed_holder(path):
    process = start_holder(path)
    assert FileLease(path).holder().pid == process.pid
    process.send_signal(signal.SIGKILL)
    process.wait()
    lease = FileLease(path)
    assert lease.holder() is None
    lease.acquire(waiting=pytest.fail)
    lease.release()
    process.stdin.close()
    process.stdout.close()


def test_a_holder_on_this_machine_does_not_expire_while_it_lives(path):
    process = start_holder(path)
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"expires": 0.0}))
    assert FileLease(path).holder().pid == process.pid
    process.communicate()


def test_a_holder_elsewhere_counts_for_several_heartbeats(path, monkeypatch):
    acquired = time.time()
    lease = FileLease(path)
    lease.acquire()
    record = json.loads(path.read_text()) | {"machine": "another", "owner": "another"}
    # This machine would see that the process lives, whatever the record says.
    lease.release()
    path.write_text(json.dumps(record))
    with monkeypatch.context() as later:
        later.setattr(time, "time", lambda: acquired + 5 * lease_module.HEARTBEAT_SECONDS)
        assert FileLease(path).holder() is not None
    path.write_text(json.dumps(record | {"expires": 0.0}))
    assert FileLease(path).holder() is None
    taken = FileLease(path)
    taken.acquire(waiting=pytest.fail)
    taken.release()


def test_a_lease_taken_over_is_noticed_and_not_freed(path, monkeypatch):
    monkeypatch.setattr(lease_module, "HEARTBEAT_SECONDS", 0.01)
    lease = FileLease(path)
    lease.acquire()
    lease.check()
    other = json.loads(path.read_text()) | {"owner": "another"}
    path.write_text(json.dumps(other))
    assert lease._lost.wait(30)
    with pytest.raises(LeaseLostError, match="taken over"):
        lease.check()
    lease.release()
    assert json.loads(path.read_text())["owner"] == "another"


@pytest.mark.parametrize("damaged", ["", "{", "[1]", '{"owner": 3}'])
def test_a_damaged_lease_is_free_unless_its_holder_lives(path, damaged):
    with FileLease(path) as held:
        held.acquire()
        path.write_text(damaged)
        assert FileLease(path).holder() is not None
    assert FileLease(path).holder() is None
    with FileLease(path) as taken:
        taken.acquire(waiting=pytest.fail)


def test_a_full_disk_does_not_silence_the_holder(path, monkeypatch):
    monkeypatch.setattr(lease_module, "HEARTBEAT_SECONDS", 0.01)
    lease = FileLease(path)
    lease.acquire()
    with lease, monkeypatch.context() as full:
        full.setattr(lease_module, "write_atomically", Mock(side_effect=OSError("no space")))
        before = path.stat().st_mtime_ns
        wait_until(lambda: path.stat().st_mtime_ns > before)


def test_a_lease_whose_record_cannot_be_written_is_free_again(path, monkeypatch):
    with monkeypatch.context() as full, pytest.raises(OSError, match="no space"):
        full.setattr(lease_module, "write_atomically", Mock(side_effect=OSError("no space")))
        FileLease(path).acquire()
    FileLease(path).acquire(waiting=pytest.fail)
