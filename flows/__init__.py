"""Orchestration: Prefect flows over the stages. No torch, no vLLM."""

import os

HEARTBEAT_SECONDS = 30
"""How often a flow run says that it lives; who is silent three times as long counts as dead."""

HEARTBEAT_VARIABLE = "PREFECT_FLOWS_HEARTBEAT_FREQUENCY"
"""Where Prefect looks for it; also in the job variables of every deployment."""

# Wherever a flow is started: the server that watches over it must not take it for dead. Prefect
# reads it when it is imported.
os.environ.setdefault(HEARTBEAT_VARIABLE, str(HEARTBEAT_SECONDS))
