"""Helpers for runs of the probe flow."""

import os
import select
import time
from pathlib import Path


def write_probes(folder, config):
    """Writes a configuration where ``python -m tests.flows.probe_flow`` can read it."""
    path = folder / f"{config.name}.json"
    path.write_text(config.model_dump_json())
    return path


def wait_until(condition):
    """Waits for a condition; a test's time limit bounds the wait."""
    while not condition():
        time.sleep(0.1)


def hanging_pids(store):
    """Waits for a probe that hangs and returns its processes, as it wrote them into its log."""

    def lines():
        logs = store.glob("logs/probe/*/*.log")
        return [line for log in logs for line in log.read_text().splitlines() if "pids " in line]

    wait_until(lines)
    return [int(word) for line in lines() for word in line.split("pids ")[1].split()]


def alive(pid):
    """True while a process runs."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def gone(pid):
    """Waits until a process is gone; a test's time limit bounds the wait."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    ended = bool(poll.poll(60_000))
    os.close(descriptor)
    return ended
