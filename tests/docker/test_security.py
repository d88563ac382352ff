"""Limits of a stage's container. A change that loosens one must change its test as well."""

import json
from pathlib import Path

import pytest

from stages.contract.errors import StageFailedError, UserError
from tests.at_work import at_work, said
from tests.launchers.launcher import logs_of

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.release]

SECRET = "a value that only the stage may know"


@pytest.fixture
def inspected(launcher, store, monkeypatch):
    """A running stage container with a secret, as the engine describes it."""
    monkeypatch.setenv("PROBE_SECRET", SECRET)
    monkeypatch.setenv("SOME_TOKEN_OF_THE_CALLER", SECRET)
    request = launcher.request(store, behaviour="hang")
    with at_work(request, launcher.runner(request, secrets={"probe": ["PROBE_SECRET"]})):
        container = launcher.container_of(request)
        container["Top"] = launcher.engine.api.top(container["Id"], "-eo pid,uid,args")
        container["Files"] = [path.read_text() for path in store.root.rglob("*") if path.is_file()]
    container["Log"] = logs_of(request)
    return container


def test_every_process_runs_as_that_user(inspected):
    processes = inspected["Top"]["Processes"]
    assert len(processes) >= 2
    user = inspected["Config"]["User"].partition(":")[0]
    assert int(user) > 0
    assert {process[1] for process in processes} == {user}


def test_a_stage_sees_the_store_read_only_but_for_its_own_folders(inspected, store):
    key = inspected["Config"]["Labels"]["geb.key"]
    modes = {mount["Destination"]: mount["RW"] for mount in inspected["Mounts"]}
    assert modes == {
        str(store.root): False,
        str(store.root / "artifacts/probe"): True,
        str(store.root / "leases/probe"): True,
        str(store.root / "logs/probe" / key): True,
        str(store.root / "work/probe" / key): True,
    }
    assert list(inspected["HostConfig"]["Tmpfs"]) == ["/tmp"]


def test_no_secret_and_nothing_of_the_caller_is_in_its_environment(inspected):
    names = {variable.partition("=")[0] for variable in inspected["Config"]["Env"]}
    assert names == {
        *("PATH", "PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "HOME"),
        *("TORCHDYNAMO_DISABLE", "USER", "LOGNAME", "GEB_IMAGE"),
        *("HF_HUB_OFFLINE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "GOMP_SPINCOUNT"),
    }
    assert SECRET not in json.dumps(inspected)


def test_a_secret_reaches_the_stage_all_the_same(launcher, store, monkeypatch):
    monkeypatch.setenv("PROBE_SECRET", SECRET)
    request = launcher.request(store, behaviour="tell_environment", message="PROBE_SECRET")
    heard = launcher.run(request, secrets={"probe": ["PROBE_SECRET"]})
    assert f"PROBE_SECRET is {SECRET}" in said(heard)


def test_a_secret_that_is_not_there_is_named(launcher, store, monkeypatch):
    monkeypatch.delenv("PROBE_SECRET", raising=False)
    with pytest.raises(UserError, match=r"execution\.docker\.secrets\.probe names PROBE_SECRET"):
        launcher.run(launcher.request(store), secrets={"probe": ["PROBE_SECRET"]})


@pytest.mark.parametrize("folder", ["image", "store", "other stage", "registry", "input"])
def test_a_stage_that_writes_elsewhere_fails(launcher, store, tmp_path, folder):
    (store.root / "artifacts/train").mkdir(parents=True)
    (store.root / "models").mkdir()
    given = tmp_path / "given"
    given.mkdir()
    path = {
        "image": Path("/opt/code/stages/x"),
        "store": store.root / "x",
        "other stage": store.root / "artifacts/train/x",
        "registry": store.root / "models/x",
        "input": given / "x",
    }[folder]
    request = launcher.request(store, behaviour="write", path=str(path))
    # Open to everyone: what keeps the stage out is the mount.
    for opened in (store.root, store.root / "artifacts/train", store.root / "models", given):
        opened.chmod(0o777)
    with pytest.raises((StageFailedError, UserError), match=r"Read-only|cannot be written"):
        launcher.run(request, mounts={str(given): "ro"})
    assert not path.exists()
