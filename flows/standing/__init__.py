"""What `geb up` keeps running on a machine: a Prefect server, a worker, and the deployments."""
