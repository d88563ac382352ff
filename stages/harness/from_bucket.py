"""A stage whose request is in a bucket: ``python -m stages.<name> s3://…/request.json``.

It shares no folder with its orchestrator: inputs, state and results go through the bucket.
"""

import os
import threading
from typing import Any

from stages.contract.errors import UserError
from stages.contract.events import Emitter
from stages.contract.request import Request
from stages.harness.program import Stage, execute
from stages.store.opening import cache_home, open_store
from stages.store.remote.store import RemoteStore
from stages.store.remote.sync import compute, signs_passed_on

OWNER_VARIABLE = "GEB_ORCHESTRATOR"
"""Environment variable: whose signs of life the stage listens to."""
SYNC_SECONDS_VARIABLE = "GEB_SYNC_SECONDS"
"""Environment variable: how often the state of the stage goes to the bucket."""


def execute_from_bucket(stage: Stage[Any], place: str, events: Emitter) -> None:
    """Computes the artifact of a request.

    ``place`` is the request's, as :meth:`stages.store.base.Store.share` returned it. UserError if
    the request is missing, or something in it is wrong.
    """
    # Below the store: logs/<stage>/<key>/<file>.
    store = open_store(place.rsplit("/", 4)[0])
    assert isinstance(store, RemoteStore)
    name = place.removeprefix(f"{store.location}/")
    request = store.bucket.read(name, Request)
    if request is None:
        raise UserError(f"no request at {place}", "start the stage by a run")
    with signs_passed_on(store, request, os.environ[OWNER_VARIABLE], cache_home()):
        if store.find(request.stage, request.key, warn=events.warning) is None:
            compute(
                store,
                request,
                lambda local: execute(stage, local, events),
                sync_seconds=float(os.environ[SYNC_SECONDS_VARIABLE]),
                on_event=events.emit,
                stopping=threading.Event(),
            )
