"""What `geb up` keeps running on a machine: a Prefect server, a worker, and the deployments."""

HEARTBEAT_SECONDS = 30
"""How often a flow run says that it lives; who is silent three times as long counts as dead."""
HEARTBEAT_VARIABLE = "PREFECT_FLOWS_HEARTBEAT_FREQUENCY"
"""Where Prefect looks for it."""
