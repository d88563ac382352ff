"""A real cluster for tests: one that KUBECONFIG names, or one that is started for them.

Its nodes see this machine's folders at the same paths. So a pod needs no more of an image than a
root folder: libraries, interpreter, packages and code are mounted from here, through a claim.
"""

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path

import psutil

from flows.pipeline.placement import KubernetesSettings
from stages.store.locks import exclusive_lock
from tests.flows.loop import ROOT
from tests.programs import lacking, run_program

TOOLS = ROOT.parent / "shared/cluster/k8s"
IMAGE = "localhost/geb-root:1"
# A pod that asks for no CPU gets what others leave, which on a busy machine is nothing. Four pods
# fit onto a node of two cores, for the tests of as many processes.
CPUS = 0.5
USER = 1000
# This machine, as pods of the tests' own cluster see it.
THIS_MACHINE = "10.243.0.254"


def kubectl(*arguments, text=None):
    """Runs kubectl with a manifest as its input, and returns what it printed."""
    done = run_program("kubectl", *arguments, input=text)
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextlib.contextmanager
def reachable_cluster(folder):
    """A cluster that kubectl reaches; one that this starts is ended by the last that uses it.

    Its nodes have the image. One process at a time loads it: of two loads at once, one may fail.

    Args:
        folder: Place of a cluster's files, the same for all test processes of a session.
    """
    # Calls of the cluster go past any proxy.
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "*"
    folder.mkdir(exist_ok=True)
    if os.environ.get("KUBECONFIG") != str(folder / "kubeconfig") and _answers():
        with exclusive_lock(folder / "guard"):
            _load_image()
        yield
        return
    if not (TOOLS / "up").exists() or os.geteuid() != 0:
        lacking(f"a cluster: KUBECONFIG names none that answers, and {TOOLS}/up wants root")
    os.environ |= {"K8S_TOP": str(folder), "KUBECONFIG": str(folder / "kubeconfig")}
    # A node that does not answer is noticed later than others that wait for it.
    os.environ |= {"LOST": "120", "EVICT": "300"}
    with (folder / "users").open("w") as users:
        with exclusive_lock(folder / "guard"):
            fcntl.flock(users, fcntl.LOCK_SH)
            if not _answers():
                done = subprocess.run([TOOLS / "up"], capture_output=True, text=True, check=False)
                assert done.returncode == 0, done.stderr
                _load_image()
        try:
            yield
        finally:
            with exclusive_lock(folder / "guard"), contextlib.suppress(BlockingIOError):
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                subprocess.run([TOOLS / "down"], check=True)


def _answers():
    if "KUBECONFIG" not in os.environ:
        return False
    with contextlib.suppress(OSError):
        command = ["kubectl", "get", "--raw", "/readyz", "--request-timeout=30s"]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    return False


@contextlib.contextmanager
def without(node, take, give):
    """A node after `take` within the block, after `give` at the end: cut, mend; kill, start."""
    number = node.removeprefix("node")
    subprocess.run([_tool_of_nodes(), number, take], check=True)
    try:
        yield
    finally:
        subprocess.run([_tool_of_nodes(), number, give], check=True)
        _await_ready(node)


@contextlib.contextmanager
def frozen(node):
    """A node all of whose processes stand still within the block, as a machine that hangs."""
    _tool_of_nodes()
    outer = int((Path(os.environ["K8S_TOP"]) / "run" / f"{node}.pid").read_text())
    stopped = set()
    # What a process started before it was stopped comes in another round.
    while new := set(psutil.Process(outer).children(recursive=True)) - stopped:
        for process in new:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        stopped |= new
    try:
        yield
    finally:
        for process in stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
        _await_ready(node)


def _tool_of_nodes():
    if "K8S_TOP" not in os.environ:
        lacking("nodes to take away: the cluster is not the tests' own")
    return TOOLS / "node"


def _await_ready(node):
    kubectl("wait", "--for=condition=Ready", f"node/{node}", "--timeout=120s")


def _load_image():
    """Loads an image that is a root folder with this machine's links, and nothing else."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "root"
        for name in ("dev", "etc", "proc", "sys", "tmp", "usr", "var"):
            (root / name).mkdir(parents=True)
        for name in ("bin", "lib", "lib64", "sbin"):
            if (Path("/") / name).is_symlink():
                (root / name).symlink_to((Path("/") / name).readlink())
        archive = Path(folder) / "root.tar"
        subprocess.run([TOOLS / "make-image", IMAGE, archive, root], check=True)
        loaded = run_program(str(TOOLS / "load-image"), str(archive))
        assert loaded.returncode == 0, loaded.stderr


@dataclass(frozen=True)
class Namespace:
    """A namespace whose claim ``machine`` is this machine's root folder."""

    name: str

    def apply(self, *things):
        """Creates or changes objects in the namespace."""
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(things)})
        kubectl("-n", self.name, "apply", "-f", "-", text=text)

    def pods(self):
        """Pods of the namespace, without deleted ones."""
        items = json.loads(kubectl("-n", self.name, "get", "pods", "-o", "json"))["items"]
        return [pod for pod in items if "deletionTimestamp" not in pod["metadata"]]

    def settings(self, *folders, **changes):
        """Settings of the runner whose pods see the interpreter, the code and these folders."""
        places = {Path("/usr"), ROOT, Path(sys.prefix), Path(sys.base_prefix)}
        # An environment may take packages from another one's folder.
        places |= {Path(folder) for folder in sys.path if folder.endswith("site-packages")}
        places |= set(folders)
        values = {
            "namespace": self.name,
            "image": IMAGE,
            "user": f"{USER}:{USER}",
            "volumes": {str(place): _of_machine(place) for place in _outermost(places)},
            "environment": {
                "PATH": f"{sys.prefix}/bin:/usr/bin",
                "PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT)),
                "PYTHONDONTWRITEBYTECODE": "1",
                "OMP_NUM_THREADS": "1",
                "MKL_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
            },
            "shm_gib": 0.25,
            "tmp_gib": 0.25,
        }
        return KubernetesSettings.model_validate(values | changes)


def _of_machine(place):
    return {"claim": "machine", "sub_path": str(place.relative_to("/"))}


def _outermost(places):
    return [
        place
        for place in sorted(places)
        if not any(place != other and place.is_relative_to(other) for other in places)
    ]


@contextlib.contextmanager
def namespace():
    """A new namespace, gone at the end of the block."""
    name = f"geb-{uuid.uuid4().hex[:8]}"
    kubectl("create", "namespace", name)
    namespace = Namespace(name)
    size = {"storage": "1Gi"}
    try:
        namespace.apply(
            {
                "apiVersion": "v1",
                "kind": "PersistentVolume",
                "metadata": {"name": name},
                "spec": {
                    "capacity": size,
                    "accessModes": ["ReadWriteMany"],
                    "storageClassName": "",
                    "claimRef": {"name": "machine", "namespace": name},
                    "hostPath": {"path": "/", "type": "Directory"},
                },
            },
            {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "metadata": {"name": "machine"},
                "spec": {
                    "accessModes": ["ReadWriteMany"],
                    "storageClassName": "",
                    "volumeName": name,
                    "resources": {"requests": size},
                },
            },
        )
        yield namespace
    finally:
        kubectl("delete", "namespace", name, "--wait=false")
        kubectl("delete", "persistentvolume", name, "--wait=false")
