"""A `geb up` at work, and what a test asks of it through Prefect's API."""

import json
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from prefect.client.orchestration import SyncPrefectClient

from flows.standing.server import free_port
from tests.flows.loop import ROOT, SMALL, geb, started, wait_for_line

_POLL_SECONDS = 1.0
# What a form is filled with to make the preset `quickstart` small.
SMALL_OVERRIDES = {name: value for name, value in SMALL.items() if name != "extends"}


@dataclass(frozen=True)
class Up:
    """A `geb up` at work.

    Attributes:
        ui: Address of its UI.
        home: Its home folder.
        store: The store that its deployments start with.
        password: Its server's, where it asks for one.
    """

    ui: str
    home: Path
    store: Path
    password: str | None = None

    @property
    def api(self):
        """Address of its API."""
        return f"{self.ui}/api"

    def client(self):
        """A client of its server."""
        return SyncPrefectClient(self.api, auth_string=self.password)

    def start(self, deployment, **parameters):
        """Starts a deployment as the UI's Submit does."""
        with self.client() as client:
            deployed = client.read_deployment_by_name(deployment)
            return client.create_flow_run_from_deployment(deployed.id, parameters=parameters)

    def wait(self, run):
        """Waits until a flow run has ended."""
        with self.client() as client:
            return ended(client, run)

    def steps(self, run):
        """State of each step of a flow run, by name; the last attempt's."""
        with self.client() as client:
            tasks = [
                task_run for task_run in client.read_task_runs() if task_run.flow_run_id == run
            ]
        tasks.sort(key=lambda each: each.created)
        return {task.name: str(task.state_name) for task in tasks}


def ended(client, run):
    """Waits until a flow run has ended, however it ends; the test's time limit bounds it."""
    while True:
        flow_run = client.read_flow_run(run)
        if flow_run.state is not None and flow_run.state.is_final():
            return flow_run
        time.sleep(_POLL_SECONDS)


@contextmanager
def geb_up(folder, *arguments):
    """A `geb up` that is ready; it is ended, and has ended all it started, afterwards.

    It is started in a folder whose modules no process may import.
    """
    up = Up(f"http://127.0.0.1:{free_port()}", folder / "home", folder / "store")
    port = up.ui.rpartition(":")[2]
    where = ("--home", up.home, "--store", up.store, *arguments)
    command = ("up", "--port", port, "--no-password", *where)
    for package in ("flows", "stages"):
        path = folder / package / "__init__.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text("raise ImportError('a module of the present folder')\n")
    with started(*command, in_foreground=True, folder=folder, PREFECT_API_URL="") as process:
        try:
            wait_for_line(process, "Ctrl-C")
            kept = up.home / "password"
            yield process, replace(up, password=kept.read_text() if kept.exists() else None)
        finally:
            geb("up", "--stop", "--home", up.home)


def failing_once(folder):
    """An oracle whose first call in a stage fails as a lost network does; else the quickstart's."""
    path = folder / "oracle.py"
    path.write_text(
        (ROOT / "data/quickstart/oracle.py").read_text()
        + "\nfrom pathlib import Path\n\n_score = score\n\n"
        "def score(prompts, responses, references):\n"
        f"    marker = Path({json.dumps(str(folder / 'called'))})\n"
        "    if not responses[0].startswith('A trial') and not marker.exists():\n"
        "        marker.touch()\n"
        "        print('the reward server hung up')\n"
        "        raise ConnectionError('no route to the reward server')\n"
        "    return _score(prompts, responses, references)\n"
    )
    return path
