"""Two iterations on real stages: what each of them read, a kill in the second, a third one."""

import os
import shutil
import signal

import psutil
import pytest

from tests.flows.loop import (
    geb_ok,
    manifests,
    result_digests,
    stage_processes,
    started,
    steps,
    wait_for_line,
    write_config,
)

SMALLER = {
    "prepare": {"test_prompts": 8, "prompts_per_iteration": 16},
    "train": {"checkpoint_every_steps": 1, "epochs": 1, "global_batch_pairs": 4},
}
ACCUMULATED = SMALLER | {
    "iterations": 2,
    "pair_data": "accumulate",
    # Long enough to be struck while it is at work.
    "train": {**SMALLER["train"], "epochs": 3, "deepspeed": {"zero_stage": 2}},
}


@pytest.fixture(scope="module")
def accumulated(prefect_server, tmp_path_factory):
    """Configuration of a finished run: accumulated pairs, ZeRO-2."""
    config = write_config(tmp_path_factory.mktemp("accumulated"), **ACCUMULATED)
    geb_ok("run", config)
    return config


def read(manifest, name):
    """Key and path of the artifacts that a step read as one input."""
    return [(artifact["key"], artifact["path"]) for artifact in manifest["inputs"][name]]


def test_artifacts_name_the_models_and_pairs_that_they_came_from(accumulated):
    artifacts = manifests(accumulated.parent / "store")
    base = (artifacts["sft"]["key"], "checkpoint")
    train = [artifacts[f"iteration-{iteration}/train"] for iteration in (1, 2)]
    policies = [base, *((step["key"], "checkpoint") for step in train)]
    pairs = [
        (artifacts[f"iteration-{iteration}/pair"]["key"], "pairs.parquet") for iteration in (1, 2)
    ]
    for index, trained in enumerate(train):
        generated = artifacts[f"iteration-{index + 1}/generate/0"]
        assert read(generated, "policy") == read(trained, "policy") == [policies[index]]
        assert read(trained, "reference") == [policies[index]]
        assert read(trained, "pairs") == pairs[: index + 1]
        evaluated = artifacts[f"iteration-{index + 1}/evaluate/generate/0"]
        assert read(evaluated, "policy") == [policies[index + 1]]
        logs = (accumulated.parent / "store/logs/train" / trained["key"]).glob("*.log")
        assert any("DeepSpeed" in log.read_text() for log in logs)
    digests = [step["inputs"]["policy"][0]["digest"] for step in train]
    assert len(set(digests)) == 2, "each iteration has another policy"


def test_a_kill_in_the_second_iteration_changes_nothing(accumulated, tmp_path):
    undisturbed = accumulated.parent / "store"
    store = shutil.copytree(undisturbed, tmp_path / "store", copy_function=shutil.copy2)
    write_config(tmp_path, **ACCUMULATED)
    # The first iteration is there; the second is computed again from its training on.
    for name, step in steps(store).items():
        if name.startswith(("iteration-2/train", "iteration-2/evaluate")):
            shutil.rmtree(store / "artifacts" / step["stage"] / step["key"])
    resume = ("resume", "small", "--store", store)
    with started(*resume) as process:
        wait_for_line(process, "iteration-2/train:", "steps")
        os.kill(process.pid, signal.SIGSTOP)
        struck = stage_processes(process)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert struck, "the strike came too late"
        psutil.wait_procs(struck)
    before = steps(store)
    assert before["iteration-1/train"]["state"] == "reused"
    assert before["iteration-2/train"]["state"] == "crashed"
    geb_ok(*resume)
    assert result_digests(store) == result_digests(undisturbed)
