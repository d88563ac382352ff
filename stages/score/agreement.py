"""What servers that score are asked by, and what is said when their answers are not as agreed."""

from __future__ import annotations

from pydantic import ValidationError

from stages.contract.errors import UserError
from stages.remote.client import Remote, RemoteSettings, start_of
from stages.score.params import ScoreParams


def connect(url: str, params: ScoreParams) -> Remote:
    """The server at ``url``, asked as patiently as the parameters say.

    Raises:
        UserError: The environment variable that shall hold the key is not set.
    """
    return Remote(
        RemoteSettings(
            url=url,
            key_env=params.remote_key_env,
            concurrency=params.concurrency,
            timeout_seconds=params.remote_timeout_seconds,
            attempts=params.remote_attempts,
            wait_seconds=params.remote_wait_seconds,
            key_setting="score.remote_key_env",
            check="check score.remote_url and what the server serves there",
        )
    )


def not_agreed(url: str, body: bytes, what: str | ValidationError) -> UserError:
    """The error of an answer that is not what was agreed."""
    if isinstance(what, ValidationError):
        first = what.errors()[0]
        place = ".".join(map(str, first["loc"]))
        what = f"{place or 'body'}: {first['msg']}"
    return UserError(
        f"the answer of {url} is not what was agreed: {what}; it begins {start_of(body)}",
        "mend the server; docs/oracles.md has the schema",
    )
