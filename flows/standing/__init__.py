"""Services of `geb up`: a Prefect server, a worker and deployments."""
