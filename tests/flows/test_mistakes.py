"""A person's mistakes: one clear message, exit code 64, no traceback, nothing half-written."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flows.execution.run_record import RunRecord
from flows.pipeline.algorithm import resolve_run
from flows.pipeline.fields import run_rows
from flows.pipeline.loading import OUR_NAMES, load_config
from stages.contract.errors import UserError
from stages.store.base import Store
from tests.flows.loop import ROOT, geb, geb_refused, steps, warm_started, write_config
from tests.programs import run_program
from tests.tiny_models import make_tiny_llama


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ("kappa=1", ["did you mean 'train.kappa'?"]),
        ("train.kapa=1", ["train.kapa", "did you mean 'kappa'?"]),
        ("per_device_train_batch_size=4", ["did you mean 'train.global_batch_pairs'?"]),
        ("train.lora.r=8", ["did you mean 'train.lora.rank'?"]),
        ("sft.lora.lora_alpha=8", ["did you mean 'alpha'?"]),
        ("train.design=arctahn", ["did you mean 'arctanh'?"]),
        ("train.reference=1", ["train.reference: Input should be 'previous'", "or equal to 2"]),
        ("train.learning_rate=fast", ["train.learning_rate", '"fast"', "number"]),
        ("generate.num_samples=1", ["num_samples is 1", "pairs_per_prompt 1", "2 samples"]),
        ("pair.pairs_per_prompt=2", ["num_samples is 2", "pairs_per_prompt 2", "4 samples"]),
        ("generate.num_samples=0", ["generate.num_samples", "greater than or equal to 1", "0"]),
        ("generate.shard_index=0", ["generate.shard_index is set by the run"]),
        ("inputs.warm_start=null", ["no policy to start from"]),
        ("sft.lora.rank=4", ["sft.lora.rank is 4", "inputs.policy is not set"]),
        ("sft.lora={rank: 4, save: adapter}", ["set sft.lora.save to 'merged'"]),
        ("train.kappa", ["is not NAME=VALUE"]),
        # Too long for a file's name: without the check the first promotion would fail.
        (f"model={'m' * 300}", ["model: String should have at most 200 characters"]),
        (f"promote.aliases=[{'a' * 300}]", ["promote.aliases.0: String should have at most 200"]),
    ],
)
def test_a_wrong_setting_is_refused_by_the_plan(
    tmp_path: Path, change: str, parts: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        resolve_run(load_config(write_config(tmp_path), [change]))
    for part in parts:
        assert part in f"{caught.value.message} {caught.value.remedy}"


def test_settings_named_as_in_trl_exist_here() -> None:
    assert set(OUR_NAMES.values()) <= {row.name for row in run_rows()}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A configuration, a store with one run, an adapter, and files that are neither."""
    write_config(tmp_path)
    run = Store.open(str(tmp_path / "store"), create=True).run_path("mine")
    for folder, name, text in (
        (run, "config.json", "{}"),
        (tmp_path / "adapter", "adapter_config.json", "{}"),
        (tmp_path / "letters", "letter.txt", "dear"),
        (tmp_path, "shadow", "root:$6$salt: 1\n"),
        (tmp_path, "extending.yaml", "extends: shadow\n"),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("command", "parts"),
    [
        ("runn", ["runn"]),
        ("plan --jsn", ["--jsn"]),
        ("up --port 99999", ["--port", "65535"]),
        ("run @/none.yaml", ["none.yaml", "No such file"]),
        ("run @/small.yaml --set iterashuns=1", ["iterashuns"]),
        ("run @/small.yaml --set inputs.prompts=[/no.jsonl]", ["/no."]),
        ("run @/small.yaml --runner nomad", ["nomad", "one of process, docker"]),
        ("run @/small.yaml --store @/letters", ["it is not a store"]),
        (
            "plan @/small.yaml --set inputs.policy=@/adapter --set inputs.warm_start=null",
            ["inputs.policy: @/adapter", "merge_and_unload"],
        ),
        # A file of another kind is not quoted: the test looks for its word `salt`.
        ("plan @/extending.yaml", ["shadow is not a configuration file", "ends in .yaml"]),
        ("plan @/shadow", ["shadow is not a configuration file", "ends in .yaml"]),
        ("run mine --store @/store", ["`geb resume mine` goes on"]),
        ("report mine.yaml --store @/store", ["name the run, not its file"]),
        ("plan x.yaml --set train.kappa 1", ["--set NAME=VALUE"]),
        ("train x.yaml", ["geb run"]),
        ("models --store /dev/null", ["correct --store"]),
        ("resume nope --store @/store", ["no run 'nope'", "runs there: mine"]),
        ("run @/small.yaml --store @/shadow/x", ["@/shadow/x: Not a directory"]),
        ("init @/shadow/x", ["@/shadow/x: Not a directory"]),
        ("up --home @/shadow --store @/store", ["@/shadow: File exists"]),
    ],
)
def test_a_mistake_is_refused_before_anything_starts(
    place: Path, command: str, parts: list[str]
) -> None:
    refusal = geb_refused(*command.replace("@", str(place)).split())
    for part in parts:
        assert part.replace("@", str(place)) in refusal
    assert "salt" not in refusal
    assert not (place / "store" / "artifacts").exists()
    assert [path.name for path in (place / "letters").iterdir()] == ["letter.txt"]


def test_a_hub_that_does_not_answer_is_named_as_a_failure(tmp_path: Path) -> None:
    config = ROOT / "configs/paper/llama3-geb-p-kl.yaml"
    done = geb(
        *("plan", config, "--set", f"store={tmp_path / 'store'}"),
        HF_ENDPOINT="http://127.0.0.1:9",
        HF_HUB_OFFLINE="0",
    )
    message = " ".join(done.stderr.split())
    assert done.returncode == 1, message
    assert "cannot ask the hub for the revision of RLHFlow/LLaMA3-SFT" in message
    assert "Traceback" not in message


def test_a_place_that_takes_no_folder_is_not_called_full(tmp_path: Path) -> None:
    done = geb("run", write_config(tmp_path), "--store", "/proc/x")
    assert done.returncode == 1
    assert "/proc/x" in done.stderr and "check that the place exists" in done.stderr
    assert "no space left" not in done.stderr


@pytest.mark.parametrize("name", ["../elsewhere", "..", "a/b", "", "-x"])
def test_a_run_s_name_never_leads_out_of_the_store(store: Store, tmp_path: Path, name: str) -> None:
    (tmp_path / "store/elsewhere").mkdir()
    (tmp_path / "store/elsewhere/config.json").write_text("{}")
    with pytest.raises(UserError, match="no run "):
        RunRecord.existing(store, name)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("chat_template*", "has no chat template"),
        ("tokenizer*", "has no tokenizer"),
        ("*.safetensors", "has no weights in safetensors"),
        ("config.json", "it has no config.json"),
    ],
)
def test_a_policy_that_lacks_files_is_refused_before_anything_starts(
    tmp_path: Path, name: str, said: str
) -> None:
    policy = make_tiny_llama(tmp_path / "checkpoint")
    for path in policy.glob(name):
        path.unlink()
    inputs = {"policy": str(policy), "warm_start": None}
    refusal = geb_refused("run", write_config(tmp_path, inputs=inputs))
    assert "inputs.policy: " in refusal
    assert said in refusal
    assert not (tmp_path / "store" / "artifacts").exists()


@pytest.mark.parametrize("command", ["plan", "run"])
@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("", ["wrong.jsonl", "has 0 rows"]),
        ('{"prompt": "red"}\n' * 16, ["wrong.jsonl", "has 16 rows"]),
        ('{"prompt": 5}\n', ["wrong.jsonl, line 1"]),
        ('{"messages": [{"role": "system", "content": "hi"}]}\n', ["wrong.jsonl, line 1", "user"]),
    ],
    ids=["empty", "all-held-out", "number", "no-user-turn"],
)
def test_wrong_prompts_are_refused_before_anything_starts(
    tmp_path: Path, command: str, content: str, parts: list[str]
) -> None:
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text(content)
    message = geb_refused(command, write_config(tmp_path, inputs={"prompts": [str(wrong)]}))
    for part in (*parts, "remedy"):
        assert part in message
    assert not (tmp_path / "store" / "artifacts").exists()


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"generate": {"max_new_tokens": 64}}, "the policy's context has 64 tokens"),
        ({"resources": {"train": {"gpus": 2}}}, "asks for 2 GPUs, this host has 1"),
    ],
)
def test_settings_beyond_the_policy_or_the_host_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], part: str
) -> None:
    monkeypatch.setenv("GEB_GPUS", "0")
    assert part in geb_refused("run", write_config(tmp_path, **changes))
    assert not (tmp_path / "store" / "runs").exists()


def test_a_sweep_of_one_run_is_refused(tmp_path: Path) -> None:
    assert "has one run" in geb_refused("sweep", write_config(tmp_path))


def test_wrong_data_is_refused_by_its_stage(finished: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "def score(prompts, responses, references):\n    return [1.0] * len(responses)\n"
    )
    inputs = warm_started(finished) | {"oracle_code": str(wrong)}
    config = write_config(tmp_path, pair={"ties": "drop"}, inputs=inputs)
    # To resume reads the same settings again: it helps where a file was wrong.
    hint = "run the same command again, or geb resume"
    done = geb("run", config)
    assert done.returncode == 64
    output = " ".join((done.stdout + done.stderr).split())
    for part in ("make a tie", hint, "remedy"):
        assert part in output
    store = tmp_path / "store"
    assert list(store.glob("artifacts/*/.scratch-*")) == []
    assert "failed" in {step["state"] for step in steps(store).values()}


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
        refusal = geb_refused("run", config)
        assert "no space left" in refusal
        assert str(disk) in refusal
        assert list((disk / "store").glob("artifacts/*/.scratch-*")) == []
        assert geb("verify", "--store", disk / "store").returncode == 0
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_the_errors_of_a_stage_called_by_hand_are_as_clear(tmp_path: Path) -> None:
    (tmp_path / "request.json").write_text("{}")
    done = run_program(sys.executable, "-m", "stages.pair", tmp_path / "request.json", cwd=ROOT)
    assert done.returncode == 64
    assert "is not a request" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_what_a_command_says_has_paths_as_they_are(tmp_path: Path) -> None:
    store, prompts = tmp_path / "[/old]" / "store", tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "the same"}\n' * 99)
    config = write_config(tmp_path, inputs={"prompts": [str(prompts)]})
    assert f"nothing of {store} is running" in geb("up", "--stop", "--home", store).stdout
    failed = geb("run", config, "--store", store)
    assert failed.returncode == 64, failed.stderr
    assert f"to compute; store {store}" in failed.stdout
    assert f"--store '{store}'" in failed.stdout + failed.stderr
