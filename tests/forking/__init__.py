"""Programs that start by a fork of a process that has loaded their libraries.

Most of a test's time would go into importing torch, transformers and Prefect again for each
program that it starts. :func:`forked_python` is an interpreter to start them with: in place of
``python -m stages.train`` it asks a server of this test process for a fork, which has the streams,
the environment, the working directory and the arguments of its asker; exit codes and signals reach
both ways. The fork server of a process runner is such a fork, too. Every other command line, that
of a stage's supervisor too, is run by the real interpreter. Tests of kills use the real one for
all.
"""

import atexit
import os
import shlex
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
_HERE = Path(__file__).parent


@cache
def forked_python():
    """Path of an interpreter whose programs are forks; its servers end with this process."""
    folder = Path(tempfile.mkdtemp(prefix="geb-forks-"))
    sockets = {name: folder / name for name in ("stages", "flows")}
    servers = [_start_server(socket) for socket in sockets.values()]
    wrapper = folder / "python"
    real, client = shlex.quote(sys.executable), shlex.quote(str(_HERE / "client.py"))
    ask = f'exec {real} -I -S {client} {sockets["stages"]} "$safe"'
    wrapper.write_text(
        "#!/bin/sh\n"
        "safe=\n"
        'if [ "$1" = -P ]; then safe=-P; shift; fi\n'
        'case "$1 $2" in\n'
        f'"-m stages.harness.fork_server") {ask} "$@" ;;\n'
        f'"-m stages.harness."*) exec {real} $safe "$@" ;;\n'
        f'"-m stages."*) {ask} "$@" ;;\n'
        f'"-m flows."*) exec {real} -I -S {client} {sockets["flows"]} "$safe" "$@" ;;\n'
        f'*) exec {real} $safe "$@" ;;\n'
        "esac\n"
    )
    wrapper.chmod(0o755)

    owner = os.getpid()

    def end():
        if os.getpid() != owner:
            return
        for server in servers:
            server.stdin.close()
            server.wait()
        for path in (*sockets.values(), wrapper):
            path.unlink()
        folder.rmdir()

    atexit.register(end)
    return str(wrapper)


def _start_server(socket):
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.forking.server", str(socket)],
        # Its end tells the server that this process is gone.
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        start_new_session=True,
    )
    assert server.stdout.readline(), "the server of forks did not start"
    return server
