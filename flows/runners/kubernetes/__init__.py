"""Stages in pods of a Kubernetes cluster."""

from importlib.util import find_spec

from stages.contract.errors import UserError

if find_spec("kubernetes") is None:
    raise UserError(
        "the runner 'kubernetes' needs the cluster's client, which is not installed",
        "pip install 'geb[kubernetes]'",
    )
