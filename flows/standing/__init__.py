"""Services of `geb up`: a Prefect server, a worker, deployments and automations."""
