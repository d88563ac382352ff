"""Fixtures and settings that several tests share."""

from __future__ import annotations

import os

# Before torch or Prefect load: one thread gives the same bits every time, and no test reaches out.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
os.environ.setdefault("DO_NOT_TRACK", "1")
