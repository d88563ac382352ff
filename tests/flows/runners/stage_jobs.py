"""Jobs of stages that no runner has made."""

import io
import threading
from pathlib import Path

from flows.runners.attempt_log import AttemptLog
from flows.runners.place import StageJob
from stages.store.base import Store


def job_of(request):
    """An attempt at a request; its events are dropped."""
    log = AttemptLog(Path("the.log"), io.StringIO())
    store = Store(Path(request.store))
    return StageJob(request, store, "request.json", log, lambda event: None, threading.Event())
