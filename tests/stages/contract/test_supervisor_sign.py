"""The supervisor as a program: an orchestrator elsewhere, time limits, secrets, exit codes."""

import os
import subprocess
import sys

WORKS = "import signal; signal.signal(signal.SIGTERM, lambda *_: exit(7)); signal.pause()"


def supervised(sign, seconds, program):
    """A program below a supervisor that never sees the end of its stdin."""
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "stages.harness.supervisor", "--grace", "30"),
            *("--sign", str(sign), "--sign-seconds", str(seconds)),
            *("--", sys.executable, "-c", program),
        ],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_without_a_sign_the_stage_ends_in_its_own_way(tmp_path):
    sign = tmp_path / "sign"
    sign.touch()
    with supervised(sign, 1.0, WORKS) as process:
        assert process.stderr is not None
        assert "no sign of the orchestrator" in process.stderr.read()
    assert process.returncode == 7


def test_a_sign_that_changes_keeps_the_stage_at_work(tmp_path):
    sign, done = tmp_path / "sign", tmp_path / "done"
    sign.touch()
    waits = f"import pathlib, time\nwhile not pathlib.Path({str(done)!r}).exists(): time.sleep(0.1)"
    with supervised(sign, 4.0, waits) as process:
        # Twice the time that it may go without one.
        for beat in range(32):
            os.utime(sign, (beat, beat))
            try:
                process.wait(0.25)
            except subprocess.TimeoutExpired:
                continue
            break
        assert process.poll() is None
        done.touch()
    assert process.returncode == 0


# A supervisor whose file server has restarted.
AWAY = """
import errno
from pathlib import Path
from stages.harness.supervisor import parse_options, supervise

def look(path):
    raise OSError(errno.ESTALE, "stale file handle")

Path.stat = look
raise SystemExit(supervise(parse_options()))
"""


def test_a_stage_outlives_an_absent_file_server():
    options = ["--sign", "sign", "--sign-seconds", "1", "--"]
    stage = [sys.executable, "-c", "import time; time.sleep(5)"]
    command = [sys.executable, "-c", AWAY, *options, *stage]
    assert subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode == 0


def test_a_stage_that_needs_more_than_the_grace_period_was_stopped():
    program = (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "print('ready', flush=True); signal.pause()"
    )
    command = [sys.executable, "-m", "stages.harness.supervisor", "--grace", "0.1", "--"]
    with subprocess.Popen(
        [*command, sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.terminate()
    assert process.returncode == 143


def test_a_stage_ends_at_its_time_limit():
    command = [sys.executable, "-m", "stages.harness.supervisor", "--limit", "0.1", "--"]
    assert subprocess.run([*command, sys.executable, "-c", WORKS], check=False).returncode == 124


def test_a_stage_that_ends_by_itself_is_not_waited_for(tmp_path):
    with supervised(tmp_path / "never made", 1000.0, "exit(3)") as process:
        pass
    assert process.returncode == 3


# `false` has ended before the supervisor looks at it.
ENDS_AT_ONCE = """
import os
from stages.harness.supervisor import parse_options, supervise

look = os.pidfd_open

def look_late(pid):
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return look(pid)

os.pidfd_open = look_late
raise SystemExit(supervise(parse_options()))
"""


def test_a_stage_that_ends_at_once_was_started_all_the_same():
    command = [sys.executable, "-c", ENDS_AT_ONCE, "--", "false"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "")


def test_stdin_brings_the_secrets_and_its_end_ends_the_stage():
    # It has its handler before it says anything.
    tells = "import os; print(os.environ['PROBE_SECRET'], flush=True)"
    program = WORKS.replace("signal.pause()", f"exec({tells!r}); signal.pause()")
    command = [sys.executable, "-m", "stages.harness.supervisor", "--secrets"]
    with subprocess.Popen(
        [*command, "--", sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write('{"PROBE_SECRET": "s3cret"}\n')
        process.stdin.flush()
        assert process.stdout.readline() == "s3cret\n"
    assert process.returncode == 7


def test_a_program_that_is_not_there_is_named():
    command = [sys.executable, "-m", "stages.harness.supervisor", "--", "/nowhere/python"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 127
    assert done.stderr == "cannot start /nowhere/python: No such file or directory\n"
