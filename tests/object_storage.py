"""Real S3 and Azure Blob servers on loopback, in other processes, and hosts that share a bucket."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager

from stages.store.remote.bucket import Bucket
from stages.store.remote.store import RemoteStore
from tests.programs import lacking

BUCKET = "experiments"
# Objects in one answer to a listing; S3 has 1000.
PAGE = 50
SECRET = "test-secret-never-to-be-seen"

# Prints its port when it answers. Conditional writes of S3 are atomic; moto's are once it has one
# request at a time. No manifest is taken while the file REFUSING exists.
_SERVER = """
import os
import sys
import threading
from pathlib import Path
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server
moto = DomainDispatcherApplication(create_backend_app)
lock = threading.Lock()
refusing = Path(os.environ.get("REFUSING", os.devnull + "/nothing"))
def one_at_a_time(environ, start_response):
    is_manifest = environ["PATH_INFO"].endswith("/manifest.json")
    if environ["REQUEST_METHOD"] == "PUT" and is_manifest and refusing.exists():
        start_response("503 Slow Down", [("Content-Length", "0")])
        return []
    with lock:
        return moto(environ, start_response)
server = make_server(sys.argv[1], 0, one_at_a_time, threaded=True)
print(server.port, flush=True)
server.serve_forever()
"""


@contextmanager
def s3_server(address="127.0.0.1", **environment):
    """A server at an address of this machine that has nothing yet; yields its port."""
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER, address],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"MOTO_S3_DEFAULT_MAX_KEYS": str(PAGE)} | environment,
        text=True,
    )
    try:
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def aws_environment(port, address="127.0.0.1"):
    """Environment by which a person reaches the server."""
    return {
        "AWS_ENDPOINT_URL": f"http://{address}:{port}",
        "AWS_ACCESS_KEY_ID": "test-access-key",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        # A test that stops the server should not wait for it long.
        "GEB_STORE_PATIENCE_SECONDS": "1",
        # No other credentials of this machine.
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def make_bucket():
    """Creates the bucket at the server of this process's environment."""
    client().create_bucket(Bucket=BUCKET)


def client():
    """A client that is not the one under test."""
    import boto3

    return boto3.client("s3")


def host(url, folder, *, create=False):
    """The store as a host sees it whose local folders are in ``folder``."""
    return RemoteStore.connect(url, folder, create=create)


def objects(url):
    """All objects below a store's prefix."""
    bucket = Bucket(url)
    return {name: entry.data for name in bucket.list() if (entry := bucket.get(name))}


class Gate:
    """A way to a server that can be closed and opened, as a network does."""

    def __init__(self, port):
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._connections = []
        self._is_open = True
        self._flows = threading.Event()
        self._flows.set()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        """Breaks all connections, and every new one."""
        self._is_open = False
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._connections.clear()

    def hold(self):
        """Keeps back all that is sent; connections stay, as where packets are lost."""
        self._flows.clear()

    def open(self):
        """End of the cut: new connections, and bytes that waited, go through again."""
        self._is_open = True
        self._flows.set()

    def end(self):
        """Frees the port."""
        self.open()
        self.close()
        self._listener.close()

    def _accept(self):
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if not self._is_open:
                near.close()
                continue
            far = socket.create_connection(self._target)
            self._connections += [near, far]
            relay = threading.Thread(target=_relay, args=(near, far, self._flows), daemon=True)
            relay.start()


def _relay(near, far, flows):
    with near, far:
        back = threading.Thread(target=_copy, args=(far, near, flows), daemon=True)
        back.start()
        _copy(near, far, flows)
        back.join()


def _copy(source, sink, flows):
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            flows.wait()
            sink.sendall(data)
    for connection in (source, sink):
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


CONTAINER = "experiments"
_ACCOUNT = "devstoreaccount1"
# Azurite's own, the same everywhere.
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@contextmanager
def azurite():
    """A server that has nothing yet; yields its port."""
    program = shutil.which("azurite-blob")
    if program is None:
        lacking("Azurite is not installed (npm install --global azurite)")
    command = [program, "--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry"]
    process = subprocess.Popen(
        [*command, "--blobHost", "127.0.0.1", "--blobPort", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        announcement = next(line for line in process.stdout if "successfully listens" in line)
        yield int(announcement.rpartition(":")[2])
    finally:
        process.kill()
        process.communicate()


def make_container(port):
    """Creates the container, by a client that is not the one under test."""
    from azure.storage.blob import BlobServiceClient

    endpoint = azure_environment(port)["AZURE_STORAGE_ENDPOINT"]
    with BlobServiceClient(endpoint, credential=_KEY) as client:
        client.create_container(CONTAINER)


def azure_environment(port):
    """Environment by which a person reaches the server."""
    return {
        "AZURE_STORAGE_ACCOUNT_NAME": _ACCOUNT,
        "AZURE_STORAGE_ACCOUNT_KEY": _KEY,
        "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{port}/{_ACCOUNT}",
        "GEB_STORE_PATIENCE_SECONDS": "1",
    }
