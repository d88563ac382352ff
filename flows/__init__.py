"""Orchestration: Prefect flows over the stages. No torch, no vLLM."""

import os

HEARTBEAT_SECONDS = 30
"""How often a flow run says that it lives; who is silent three times as long counts as dead."""

# Wherever a flow is started: the server that watches over it must not take it for dead. Prefect
# reads it when it is imported.
os.environ.setdefault("PREFECT_FLOWS_HEARTBEAT_FREQUENCY", str(HEARTBEAT_SECONDS))
