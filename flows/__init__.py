"""Orchestration: Prefect flows over the stages. No torch, no vLLM."""

import os

PREFECT_HEARTBEAT_SECONDS = 30
"""Interval of a flow run's heartbeats; after three intervals without one it counts as dead."""

HEARTBEAT_VARIABLE = "PREFECT_FLOWS_HEARTBEAT_FREQUENCY"
"""Environment variable of the interval; also in the job variables of every deployment."""

# Set for every process that runs a flow, or the server takes it for dead. Prefect reads it when it
# is imported.
os.environ.setdefault(HEARTBEAT_VARIABLE, str(PREFECT_HEARTBEAT_SECONDS))
