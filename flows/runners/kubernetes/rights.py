"""Rights that the runner needs in its namespace: those of configs/cluster/kubernetes/role.yaml."""

from __future__ import annotations

from flows.runners.kubernetes.client import RIGHTS_REMEDY, Cluster
from stages.contract.errors import UserError

RIGHTS = (
    ("pods", "create"),
    ("pods", "list"),
    ("pods", "watch"),
    ("pods", "delete"),
    ("pods/log", "get"),
    ("events", "list"),
)
"""Resources and verbs, none of which is asked for without being used."""


def missing_rights(cluster: Cluster) -> list[str]:
    """Rights that this account lacks, as ``verb resource``."""
    return [f"{verb} {what}" for what, verb in RIGHTS if not cluster.may(verb, what)]


def check_rights(cluster: Cluster) -> None:
    """Refuses a cluster before the first stage where a right is missing.

    Raises:
        UserError: It names what is missing.
    """
    missing = missing_rights(cluster)
    if missing:
        raise UserError(
            f"in namespace {cluster.namespace!r} of {cluster.server} this account may not "
            f"{', '.join(missing)}",
            RIGHTS_REMEDY,
        )
