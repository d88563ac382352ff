"""Settings of a server that a stage asks over HTTP. Flows import them: pydantic only."""

from __future__ import annotations

from stages.contract.params import Settings, speed_only


class ServerSettings(Settings):
    """Address of a server, and the patience with which it is asked."""

    url: str | None = speed_only(None, description="Address to post to.")
    key_env: str | None = speed_only(
        None,
        description="Name of the environment variable that holds the bearer token; unset sends "
        "none.",
    )
    concurrency: int = speed_only(8, ge=1, description="Requests at once.")
    timeout_seconds: float = speed_only(120.0, gt=0, description="Time limit of one request.")
    attempts: int = speed_only(5, ge=1, description="Times that a request is sent.")
    wait_seconds: float = speed_only(
        1.0, ge=0, description="Wait before the second attempt; doubled each time."
    )
