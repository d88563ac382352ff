"""Asks the server for a fork, passes signals on to it, and ends as the fork ends.

``python -I -S client.py SOCKET SAFE -m MODULE ARGUMENTS…``: it loads few modules, to be quick. SAFE
is ``-P`` or empty.
"""

import json
import os
import signal
import socket
import sys


def main():
    """Runs the program and ends as it ended."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(sys.argv[1])
    request = {
        "is_safe": bool(sys.argv[2]),
        "module": sys.argv[4],
        "arguments": sys.argv[5:],
        "folder": os.getcwd(),  # noqa: PTH109 - pathlib loads slowly
        "environment": dict(os.environ),
        "parent": os.getppid(),
    }
    message = json.dumps(request).encode()
    length = len(message).to_bytes(8, "big")
    socket.send_fds(connection, [length], [0, 1, 2])
    connection.sendall(message)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, frame: connection.sendall(bytes([number])))
    # The fork has them: a pipe must end when it has closed them, not when this process does.
    for stream in (0, 1, 2):
        os.close(stream)
    answer = connection.recv(4)
    if len(answer) < 4:
        os._exit(70)
    code = os.waitstatus_to_exitcode(int.from_bytes(answer, "big"))
    if code >= 0:
        os._exit(code)
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)


main()
