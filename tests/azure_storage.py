"""Azurite, a real Azure Blob server, on loopback."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from tests.lacking import lacking

CONTAINER = "experiments"
_ACCOUNT = "devstoreaccount1"
# Azurite's own, the same everywhere.
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@contextmanager
def azurite() -> Iterator[int]:
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
    assert process.stdout is not None
    try:
        announcement = next(line for line in process.stdout if "successfully listens" in line)
        yield int(announcement.rpartition(":")[2])
    finally:
        process.kill()
        process.communicate()


def make_container(port: int) -> None:
    """Creates the container, by a client that is not the one under test."""
    from azure.storage.blob import BlobServiceClient

    endpoint = azure_environment(port)["AZURE_STORAGE_ENDPOINT"]
    with BlobServiceClient(endpoint, credential=_KEY) as client:
        client.create_container(CONTAINER)


def azure_environment(port: int) -> dict[str, str]:
    """Environment by which a person reaches the server."""
    return {
        "AZURE_STORAGE_ACCOUNT_NAME": _ACCOUNT,
        "AZURE_STORAGE_ACCOUNT_KEY": _KEY,
        "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{port}/{_ACCOUNT}",
        "GEB_STORE_PATIENCE_SECONDS": "1",
    }
