"""Home folder of a `geb up`: its database, its logs, its password, and the record of what runs."""

import os
import secrets
import shlex
import signal
import time
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from stages.contract.atomic import atomic_path
from stages.contract.errors import GebError, UserError
from stages.store.locks import is_held, try_lock

DEFAULT_HOME = Path("~/.geb")
HOME_VARIABLE = "GEB_HOME"
_POLL_SECONDS = 0.1


class Standing(BaseModel):
    """Record of a running `geb up`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pid: int
    ui: str
    """Address of the Prefect UI."""
    api: str
    """Address of the Prefect API, for PREFECT_API_URL."""
    store: str
    """Store that the deployments start with."""
    password_file: str | None = None
    """File of the password that the server asks for; None if it asks for none."""

    @property
    def exports(self) -> str:
        """The command of a shell after which `geb run` reports to this server."""
        command = f"export PREFECT_API_URL={self.api}"
        if self.password_file:
            command += f' PREFECT_API_AUTH_STRING="$(cat {shlex.quote(self.password_file)})"'
        return command


class Home:
    """One home folder, ``GEB_HOME`` or ``~/.geb`` if none is named; made when it is claimed.

    Its record is locked for as long as its `geb up` lives.
    """

    def __init__(self, path: Path | None = None) -> None:
        path = path or Path(os.environ.get(HOME_VARIABLE) or DEFAULT_HOME)
        self.path = path.expanduser().absolute()
        self.password_file = self.path / "password"
        self._record = self.path / "up.json"

    def log(self, name: str) -> Path:
        """Log file of a process."""
        return self.path / f"{name}.log"

    def password(self) -> str:
        """Name and password in Prefect's form, made when they are first asked for."""
        if not self.password_file.exists() or not self.password_file.stat().st_size:
            with atomic_path(self.password_file) as scratch:
                scratch.touch(mode=0o600)
                scratch.write_text(f"geb:{secrets.token_urlsafe(18)}")
        return self.password_file.read_text().strip()

    def claim(self) -> bool:
        """Locks the home up to the end of this process; returns False if another has done so."""
        self.path.mkdir(0o700, parents=True, exist_ok=True)
        is_free = try_lock(self._record) is not None
        if is_free:
            self._record.write_text("")
        return is_free

    def announce(self, standing: Standing) -> None:
        """Writes the record; to be called by the process that has claimed the home."""
        self._record.write_text(standing.model_dump_json(indent=2))

    def standing(self) -> Standing | None:
        """Record of the running `geb up`; None if there is none, UserError if it only starts."""
        if not is_held(self._record):
            return None
        try:
            return Standing.model_validate_json(self._record.read_text())
        except ValidationError as error:
            raise UserError(
                f"`geb up` of {self.path} is starting or ending", "try again in a moment"
            ) from error

    def end(self, timeout_seconds: float) -> bool:
        """Ends the running `geb up` of this home; returns False if there is none.

        Raises:
            UserError: It is only starting.
            GebError: It does not end in time.
        """
        standing = self.standing()
        if standing is None:
            return False
        os.kill(standing.pid, signal.SIGTERM)
        deadline = time.monotonic() + timeout_seconds
        while is_held(self._record):
            if time.monotonic() > deadline:
                raise GebError(f"pid {standing.pid} does not end; its logs are in {self.path}")
            time.sleep(_POLL_SECONDS)
        return True
