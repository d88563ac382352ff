"""A person's mistakes: one clear message, exit code 64, no traceback, nothing half-written."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.execution.run_record import RunRecord
from stages.contract.errors import UserError
from stages.contract.local_store import LocalStore
from tests.flows.loop import ROOT, geb, steps, warm_started, write_config


def refused(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    """Asserts exit code 64 and one message that holds ``parts``."""
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 64, said
    assert "Traceback" not in said
    for part in parts:
        assert part in said
    assert "remedy" in said


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ("train.kapa=1", ["train.kapa", "did you mean 'kappa'"]),
        ("iterashuns=1", ["iterashuns", "did you mean 'iterations'"]),
        ("train.learning_rate=fast", ["train.learning_rate", '"fast"', "number"]),
        ("generate.num_samples=1", ["num_samples is 1", "'best_worst'", "at least 2"]),
        ("pair.pairs_per_prompt=2", ["pairs_per_prompt is 2", "num_samples 2", "4 samples"]),
        ("generate.backend=openai", ["openai.url and openai.model"]),
        ("generate.num_samples=0", ["generate.num_samples", "greater than or equal to 1", "0"]),
        ("generate.shard_index=0", ["generate.shard_index is set by the run"]),
        ("inputs.prompts=[/nowhere/prompts.jsonl]", ["/nowhere/prompts.jsonl"]),
        ("inputs.warm_start=null", ["no policy to start from"]),
        ("sft.lora={rank: 4, save: both}", ["sft.lora.save is 'both'", "no inputs.policy"]),
        ("sft.lora={rank: 4, save: adapter}", ["set sft.lora.save to 'merged'"]),
        (
            "train={reference: ema, lora: {rank: 4, save: adapter}}",
            ["reference = 'ema'", "set lora.save to 'merged'"],
        ),
        ("train.kappa", ["is not NAME=VALUE"]),
        # Of which a file system makes no folder, or no file, once the first model is trained.
        (f"model={'m' * 300}", ["model: String should have at most 200 characters"]),
        (f"promote.aliases=[{'a' * 300}]", ["promote.aliases.0: String should have at most 200"]),
        (
            "train={reference_logprobs: sampler, reference: initial}",
            ["reference = 'initial'", "set reference_logprobs to 'model'"],
        ),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_starts(
    tmp_path: Path, change: str, parts: list[str]
) -> None:
    refused(geb("run", write_config(tmp_path), "--set", change), *parts)
    assert not (tmp_path / "store" / "artifacts").exists()


def test_what_an_adapter_cannot_be_is_refused_in_the_plan(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    config = write_config(tmp_path, train={"lora": {"rank": 1024, "save": "adapter"}})
    start = ("--set", f"inputs.policy={adapter}", "--set", "inputs.warm_start=null")
    refused(geb("plan", config, *start), f"inputs.policy: {adapter}", "merge_and_unload")
    refused(geb("plan", config, "--set", "generate.backend=vllm"), "rank 1024", "512 at most")


def test_a_runner_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    refused(geb("run", write_config(tmp_path), "--runner", "nomad"), "nomad", "'process'")


def test_a_hub_that_does_not_answer_is_no_mistake_and_named(tmp_path: Path) -> None:
    config = ROOT / "configs/paper/llama3-geb-p-kl.yaml"
    done = geb(
        *("plan", config, "--set", f"store={tmp_path / 'store'}"),
        HF_ENDPOINT="http://127.0.0.1:9",
        HF_HUB_OFFLINE="0",
    )
    said = " ".join(done.stderr.split())
    assert done.returncode == 1, said
    assert "cannot ask the hub for the revision of RLHFlow/LLaMA3-SFT" in said
    assert "Traceback" not in said


def test_an_artifact_that_is_not_there_is_named(tmp_path: Path) -> None:
    geb("plan", write_config(tmp_path))
    refused(geb("lineage", "zzz", "--store", tmp_path / "store"), "zzz", "it fits: none")


def test_a_missing_configuration_names_itself(tmp_path: Path) -> None:
    refused(geb("run", tmp_path / "none.yaml"), "none.yaml", "No such file")


def test_an_unknown_command_or_option_is_the_person_s_mistake() -> None:
    refused(geb("runn"), "runn")
    refused(geb("plan", "--jsn"), "--jsn")


def test_an_unknown_run_names_those_that_there_are(tmp_path: Path) -> None:
    geb("plan", write_config(tmp_path))
    refused(geb("resume", "nope", "--store", tmp_path / "store"), "no run 'nope'")


@pytest.mark.parametrize("name", ["../elsewhere", "..", "a/b", "", "-x"])
def test_a_run_s_name_never_leads_out_of_the_store(tmp_path: Path, name: str) -> None:
    store = LocalStore.open(str(tmp_path / "store"), create=True)
    (tmp_path / "store/elsewhere").mkdir()
    (tmp_path / "store/elsewhere/config.json").write_text("{}")
    with pytest.raises(UserError, match="is not the name of a run"):
        RunRecord.existing(store, name)


def test_a_folder_that_is_no_store_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/letter.txt").write_text("dear")
    refused(
        geb("run", write_config(tmp_path), "--set", f"store={tmp_path / 'mine'}"),
        "it is not a store",
    )
    assert [each.name for each in (tmp_path / "mine").iterdir()] == ["letter.txt"]


def _oracle(body: str) -> Callable[[Path], dict[str, Any]]:
    def change(folder: Path) -> dict[str, Any]:
        path = folder / "oracle.py"
        path.write_text(f"def score(prompts, responses, references):\n    return {body}\n")
        return {"inputs": {"oracle_code": str(path)}}

    return change


def _prompts(text: str) -> Callable[[Path], dict[str, Any]]:
    def change(folder: Path) -> dict[str, Any]:
        path = folder / "prompts.jsonl"
        path.write_text(text)
        return {"inputs": {"prompts": [str(path)]}}

    return change


def _checkpoint_without(*names: str) -> Callable[[Path], dict[str, Any]]:
    def change(folder: Path) -> dict[str, Any]:
        from tests.tiny_models import make_tiny_llama

        make_tiny_llama(folder / "checkpoint")
        for name in names:
            for path in (folder / "checkpoint").glob(name):
                path.unlink()
        return {"inputs": {"policy": str(folder / "checkpoint"), "warm_start": None}}

    return change


def test_a_policy_without_chat_template_is_refused_before_anything_starts(tmp_path: Path) -> None:
    config = write_config(tmp_path, **_checkpoint_without("chat_template*")(tmp_path))
    refused(geb("run", config), "inputs.policy", "has no chat template")
    assert not (tmp_path / "store" / "artifacts").exists()


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (_prompts(""), ["prompts.jsonl", "holds no prompts"]),
        (
            _prompts('{"messages": [{"role": "system", "content": "hi"}]}\n'),
            ["prompts.jsonl", "line 1", "user"],
        ),
        (_oracle("[1.0] * len(responses)"), ["are ties"]),
        (_checkpoint_without("tokenizer*"), ["tokenizer"]),
    ],
    ids=["empty", "no-user-turn", "all-tied", "no-tokenizer"],
)
def test_wrong_data_is_refused_by_its_stage(
    finished: Path,
    tmp_path: Path,
    change: Callable[[Path], dict[str, Any]],
    parts: list[str],
) -> None:
    changes = change(tmp_path)
    changes["inputs"] = warm_started(finished) | changes["inputs"]
    config = write_config(tmp_path, pair={"ties": "drop"}, **changes)
    # To resume reads the same settings again: it helps where a file was wrong.
    hint = "if a setting is wrong, correct it and run it again; if a file is, go on with"
    refused(geb("run", config), *parts, hint)
    store = tmp_path / "store"
    assert list(store.glob("artifacts/*/.scratch-*")) == []
    assert "failed" in {each["state"] for each in steps(store).values()}


@pytest.mark.slow
def test_a_full_disk_is_named_and_leaves_nothing_half_written(
    finished: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, check=False).returncode:
        pytest.fail("this test mounts a small tmpfs and needs root for it")
    try:
        inputs = warm_started(finished)
        config = write_config(tmp_path, inputs=inputs, store=str(disk / "store"))
        done = geb("run", config)
        refused(done, "no space left", str(disk))
        assert list((disk / "store").glob("artifacts/*/.scratch-*")) == []
        assert geb("verify", "--store", disk / "store").returncode == 0
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_the_errors_of_a_stage_called_by_hand_are_as_clear(tmp_path: Path) -> None:
    (tmp_path / "request.json").write_text("{}")
    done = subprocess.run(
        [sys.executable, "-m", "stages.pair", str(tmp_path / "request.json")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 64
    assert "is not a request" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
