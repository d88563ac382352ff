"""Requests for probes."""

from typing import Any

from stages.contract.request import Request, Resources, make_request
from stages.store.base import Store
from tests.probe_stage import ProbeParams


def probe_request(store: Store, resources: Resources | None = None, **params: Any) -> Request:
    """A request for one probe.

    Args:
        store: Store of its artifact.
        resources: Its resources.
        params: Parameters of the probe.
    """
    return make_request(
        ProbeParams(**params),
        inputs={},
        seed=0,
        store=str(store.root),
        run="test",
        step="probe/0",
        resources=resources,
    )
