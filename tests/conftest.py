"""Fixtures and settings that several tests share."""

import os
import signal
import threading
import uuid

import pytest
from hypothesis import settings

from stages.store.base import Store
from tests.flows.loop import geb_ok, write_config
from tests.flows.prefect_server import Server
from tests.object_storage import (
    BUCKET,
    CONTAINER,
    aws_environment,
    azure_environment,
    azurite,
    host,
    make_bucket,
    make_container,
    s3_server,
)
from tests.probe_stage import install
from tests.scripted_server import ScriptedServer

# Before torch or Prefect load: one thread gives the same bits every time, and no test reaches out.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
os.environ.setdefault("DO_NOT_TRACK", "1")
# Prefect starts no server in a test process, which it would have to end at exit.
os.environ.setdefault("PREFECT_SERVER_ALLOW_EPHEMERAL_MODE", "false")

# A shell that starts the tests in the background has them ignore Ctrl-C, and what they start, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No test depends on the speed of the machine.
settings.register_profile("any speed", deadline=None)
settings.load_profile("any speed")


# Comes after marks have deselected tests, so that the rest alone is sorted.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Puts long files first, the longest in containers before all: short ones fill the end.

    The other files in containers come last: the images are built for the first one, for minutes, in
    which the other test processes would wait.
    """
    marked = {
        name: list(dict.fromkeys(item.path for item in items if item.get_closest_marker(name)))
        for name in ("docker", "loop", "slow")
    }
    first, others = marked["docker"][:1], set(marked["docker"][1:])
    ranks = [set(first), set(marked["loop"]), set(marked["slow"])]
    items.sort(key=lambda item: [item.path in others, *(item.path not in paths for paths in ranks)])


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory):
    """A Prefect server on loopback, with SQLite; every `geb` of the test uses it."""
    home = tmp_path_factory.mktemp("prefect")
    server = Server(home)
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFECT_API_URL", server.api)
        patch.setenv("PREFECT_HOME", str(home))
        yield server.api
    server.stop()


@pytest.fixture(scope="session")
def finished(prefect_server, tmp_path_factory):
    """Configuration of a small run that went through undisturbed; do not change its store."""
    folder = tmp_path_factory.mktemp("finished")
    config = write_config(folder)
    geb_ok("run", config)
    return config


@pytest.fixture
def store(tmp_path):
    """An empty store."""
    return Store.in_folder(str(tmp_path / "store"), create=True)


@pytest.fixture
def probe_stage(tmp_path, monkeypatch):
    """Makes ``python -m stages.probe`` work in what the test starts."""
    install(tmp_path / "code", monkeypatch)


@pytest.fixture
def serve(monkeypatch):
    """Starts scripted servers, which end with the test."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    servers = []

    def start(behave):
        server = ScriptedServer(behave)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.released.set()
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="session")
def s3():
    """Port of an S3 server with an empty bucket."""
    with s3_server() as port:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in aws_environment(port).items():
                patch.setenv(name, value)
            make_bucket()
        yield port


@pytest.fixture
def url(s3, monkeypatch):
    """A prefix of the bucket that nothing is in; this process reaches the server."""
    for name, value in aws_environment(s3).items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


@pytest.fixture(scope="session")
def azure():
    """Port of an Azure Blob server with an empty container."""
    with azurite() as port:
        make_container(port)
        yield port


@pytest.fixture
def az_url(azure, monkeypatch):
    """A prefix of the container that nothing is in; this process reaches the server."""
    for name, value in azure_environment(azure).items():
        monkeypatch.setenv(name, value)
    return f"az://{CONTAINER}/{uuid.uuid4().hex}"


@pytest.fixture
def here(url, tmp_path):
    """An empty store in the bucket, as one host sees it."""
    return host(url, tmp_path / "here", create=True)


@pytest.fixture
def there(here, tmp_path):
    """The same store, as another host sees it."""
    return host(here.location, tmp_path / "there")
