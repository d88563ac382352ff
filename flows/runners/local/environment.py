"""Environment variables of programs that the orchestrator starts on this machine."""

import os

# No stage talks to Prefect.
_ORCHESTRATOR_ONLY = (
    "PREFECT_API_AUTH_STRING",
    "PREFECT_API_DATABASE_CONNECTION_URL",
    "PREFECT_API_DATABASE_PASSWORD",
    "PREFECT_API_KEY",
    "PREFECT_SERVER_API_AUTH_STRING",
    "PREFECT_SERVER_DATABASE_CONNECTION_URL",
    "PREFECT_SERVER_DATABASE_PASSWORD",
)
# Where the store is in a bucket, the orchestrator alone talks to it.
_BUCKET = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AZURE_CLIENT_SECRET",
    "AZURE_STORAGE_ACCESS_KEY",
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_CLIENT_SECRET",
    "AZURE_STORAGE_MASTER_KEY",
    "AZURE_STORAGE_SAS_KEY",
    "AZURE_STORAGE_SAS_TOKEN",
    "AZURE_STORAGE_TOKEN",
    "GOOGLE_BEARER_TOKEN",
    "GOOGLE_SERVICE_ACCOUNT_KEY",
)


def stage_environment(*, in_bucket: bool) -> dict[str, str]:
    """This process's variables without secrets; ``in_bucket`` also removes secrets of buckets."""
    # VIRTUAL_ENV: the stage's own Python must not resolve packages of the orchestrator's.
    # PYTHONSAFEPATH: stages get -P; programs that code of the user starts are as without it.
    of_python = {"VIRTUAL_ENV", "PYTHONSAFEPATH"}
    left_out = {*_ORCHESTRATOR_ONLY, *(_BUCKET if in_bucket else ()), *of_python}
    return {name: value for name, value in os.environ.items() if name not in left_out}
