"""A person's mistakes: one clear message, exit code 64, no traceback, nothing half-written."""

import json
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from stages.store.base import Store
from tests.flows.loop import ROOT, geb, geb_refused, steps, warm_started, write_config
from tests.programs import run_program
from tests.stage_calls import write_jsonl
from tests.tiny_models import make_tiny_llama, make_tiny_reward_model

# Settings of a plan, and parts of the message.
SETTINGS = {
    "kappa=1": ["did you mean train.kappa?"],
    "train.kapa=1": ["train.kapa", "did you mean 'train.kappa'?"],
    "sft.lora.lora_alpha=8": ["did you mean 'sft.lora.alpha'?"],
    "train.design=arctahn": ["did you mean 'arctanh'?"],
    "train.reference=1": ["train.reference: Input should be 'previous'"],
    "train.learning_rate=fast": ["train.learning_rate", '"fast"', "number"],
    "generate.num_samples=1": ["num_samples is 1", "pairs_per_prompt 1", "2 samples"],
    "generate.stop_token_ids=true": ["generate.stop_token_ids", "not true"],
    "generate.temperature=0": ["generate.temperature is 0", "pairs need different ones"],
    "train.deepspeed.offload_optimizer=true": ["offload_optimizer needs ZeRO"],
    "train.deepspeed={zero_stage: 2, offload_parameters: true}": ["needs zero_stage 3"],
    "evaluation.temperature=0": ["evaluation: temperature is 0", "set num_samples to 1"],
    "prepare.iterations=2": ["prepare.iterations is set by the run"],
    "generate.max_new_tokens=64": ["the context has 64 tokens"],
    "inputs.warm_start=null": ["no policy to start from"],
    "sft.lora.rank=4": ["sft.lora.rank is 4", "inputs.policy is not set"],
    "train.kappa": ["is not NAME=VALUE"],
    "train={kappa: [": ["is not valid YAML"],
    # Too long for a file's name: without the check the first promotion would fail.
    f"model={'m' * 300}": ["model: String should have at most 200 characters"],
    "train.objective=python": ["train.objective is 'python', and inputs.objective_code"],
    "pair.strategy=python": ["pair.strategy is 'python', and inputs.strategy_code"],
    "score.oracle=python inputs.oracle_code=null": ["inputs.oracle_code"],
    "score.oracle=reward_model": ["inputs.oracle_model"],
    "score.oracle=weighted score.weighted.weights={python: 1, reward_model: 1}": [
        "the oracle reward_model needs inputs.oracle_model"
    ],
    "execution.interpreters={evaluate: no-such-python}": ["no Python interpreter at no-such-pyth"],
    "execution.interpreters={evaluate: @/shadow}": ["no Python interpreter at @/shadow"],
    **{
        f"execution.{table}": ["names no stage: genrate; stages are prepare"]
        for table in (
            "interpreters={genrate: python}",
            "docker.secrets={genrate: [TOKEN]}",
        )
    },
    "inputs.policy=@/adapter inputs.warm_start=null": ["inputs.policy: @/adapter", "merge_and_un"],
    **{
        f"inputs.policy=@/{folder} inputs.warm_start=null": ["inputs.policy: ", f"@/{folder}", part]
        for folder, part in (
            ("no-template", "has no chat template"),
            ("no-tokenizer", "has no tokenizer"),
            ("no-weights", "has no weights in safetensors"),
            ("no-config", "it has no config.json"),
        )
    },
    **{
        f"suites={{front: {{prompts: good.jsonl, {suite}}}}} {more}".strip(): [part]
        for suite, more, part in (
            ("prepare: {test_prompts: 4}", "", "prepare.test_prompts is about training"),
            ("oracle_code: mine.py", "", "set the suite's `score`"),
            ("after: never", "", "suites.front.after"),
            ("score: {oracle: reward_model}", "", "reward_model needs suites.front.oracle_model"),
            ("", "promote.suites_hold={a: 0.1}", "suites_hold names a, and suites are: front"),
            ("", "iterations=2 promote.suites_hold={front: 0.1}", "set suites.front.after to each"),
            ("", "promote.suites_hold={front: -0.1}", "promote.suites_hold.front"),
        )
    },
    "suites={front: {evaluation: {num_samples: 4}}}": ["neither prompts nor score"],
    "suites={gold: {score: {oracle: math_verify}, evaluation: {top_p: 0.7}}}": [
        "suites.gold: evaluation.top_p is set",
        "leave it out",
    ],
    "suites={front: {prompts: /no.jsonl}}": ["no such file or folder: /no.jsonl"],
    "inputs.policy=~nouser/model": ["~nouser/model: no such home folder"],
    "inputs.prompts=[no.jsonl]": ["no such file or folder: @/no.jsonl"],
    "inputs.prompts=[@/control.jsonl] inputs.policy=@/checkpoint inputs.warm_start=null": [
        "control.jsonl, line 1",
        "'<user>'",
        "generate.allow_control_tokens",
    ],
    "inputs.policy=@/reward-model inputs.warm_start=null": [
        "inputs.policy: ",
        "LlamaForSequenceClassification",
    ],
    "inputs.policy=@/quantised inputs.warm_start=null": [
        "inputs.policy: ",
        "quantised is quantised",
        "generate.vllm.extra_engine_args",
    ],
    "inputs.policy=@/own-code inputs.warm_start=null": ["inputs.policy: ", "never run"],
    "score.oracle=reward_model inputs.oracle_model=@/checkpoint": [
        "inputs.oracle_model: ",
        "LlamaForCausalLM",
    ],
    "inputs.prompts=[@/number.jsonl]": ["number.jsonl, line 1"],
    "inputs.prompts=[@/shadow]": ["shadow is of no known kind: rows are read from .jsonl"],
    "inputs.warm_start=@/good.jsonl": ["good.jsonl, line 1", "neither messages nor a prompt and"],
    "inputs.warm_start=@/answer-alone.jsonl": ["answer-alone.jsonl, line 1", "no user turn"],
    "inputs.preferences=@/good.jsonl": ["good.jsonl, line 1", "'chosen'"],
    "preferences.invalid_rows=drop": ["preferences.invalid_rows is set by the run"],
    "inputs.prompts=[@/picture.jsonl]": ["picture.jsonl, line 1: the row holds images"],
    "evaluation.pass_at_k=[2]": ["set the smallest score of a correct response"],
    "evaluation={correct_from: 1, pass_at_k: [65]}": ["raise num_samples"],
    "evaluation={correct_from: 1, pass_at_k: [0]}": ["pass_at_k has 0"],
    "suites.more={prompts: @/good.jsonl, evaluation: {num_samples: 4}}": [
        "suites.more.evaluation.max_new_tokens is 4096",
        "context has 64 tokens",
    ],
    "generate.max_length_tokens=65": ["max_length_tokens is 65", "context has 64", "64 or less"],
    "generate.max_length_tokens=50 evaluation.max_new_tokens=50": ["context has 50 tokens"],
    "evaluation.max_new_tokens=64": ["evaluation.max_new_tokens is 64", "context has 64 tokens"],
    "suites.more={prompts: @/number.jsonl}": ["number.jsonl, line 1"],
    "score.oracle=math_verify inputs.prompts=[@/many.jsonl]": [
        "score.oracle needs reference answers",
        "none of the first 40 prompts",
        "set prepare.reference_column",
    ],
    "suites.gold.score.oracle=math_verify inputs.prompts=[@/many.jsonl]": [
        "suites.gold.score.oracle needs reference answers",
        "set prepare.reference_column",
    ],
    "suites.more={prompts: @/good.jsonl, score: {oracle: math_verify}}": [
        "suites.more.score.oracle needs",
        "set suites.more.prepare.reference_column",
    ],
    "suites.more={prompts: @/good.jsonl, score: {oracle: judge, judge: {url: http://host, "
    "model: m, mode: pairwise, against: reference}}}": ["suites.more.score.oracle needs"],
    # The quickstart's oracle is a file of Python.
    "score={oracle: judge, judge: {url: http://host, model: m}}": [
        "quickstart/oracle.py does not show response",
        "set oracle_code to null",
    ],
    "suites.more={score: {oracle: judge, judge: {url: http://host, model: m}}, "
    "oracle_code: @/good.jsonl}": ["good.jsonl does not show response"],
    "inputs.prompts=[@/no-user.jsonl]": ["no-user.jsonl, line 1", "user"],
}
# Addresses and keys of servers; {} is the oracle.
SERVERS = {
    "user and password": ({"url": "http://user:SECRET@host/"}, "key_env"),
    "password": ({"url": "https://:SECRET@host"}, "key_env"),
    "file": ({"url": "file:///etc/passwd"}, "write http://HOST"),
    "port beyond": ({"url": "http://host:99999"}, "Port out of range"),
    "empty": ({"url": ""}, "needs {}.url"),
    "key": ({"key_env": "GEB_NOT_SET"}, "{}.key_env is 'GEB_NOT_SET'"),
}
COMMANDS = {
    "runn": ["runn"],
    "train x.yaml": ["'train'", "--help"],
    "plan --jsn": ["--jsn"],
    "plan x.yaml --set train.kappa 1": ["--set NAME=VALUE"],
    # A file of another kind is not quoted: the test looks for its word `salt`.
    "plan @/extending.yaml": ["shadow is not a configuration file", "ends in .yaml"],
    "plan @/shadow": ["shadow is not a configuration file", "ends in .yaml"],
    "plan @/itself.yaml": ["@/files/back.yaml extends @/files/../itself.yaml"],
    "run @/none.yaml": ["none.yaml", "No such file"],
    "run @/files/far.yaml": ["no such file or folder: @/files/data/none.jsonl"],
    "run @/small.yaml --set iterashuns=1": ["iterashuns"],
    "run @/small.yaml --set inputs.prompts=[@/number.jsonl]": ["number.jsonl, line 1"],
    "run @/small.yaml --set resources.train.gpus=2": ["asks for 2 GPUs, this host has 1"],
    "run @/small.yaml --runner nomad": ["nomad", "one of process, docker"],
    "run @/small.yaml --store @/letters": ["it is not a store"],
    "run @/small.yaml --store @/shadow/x": ["@/shadow/x: Not a directory"],
    "run @/small.yaml --from trane": ["no step 'trane'"],
    "run mine --store @/store": ["`geb resume RUN` goes on"],
    "resume nope --store @/store": ["no run 'nope'", "runs there: mine"],
    "report mine.yaml --store @/store": ["name the run, not its file"],
    "report ../elsewhere --store @/store": ["no run '../elsewhere'"],
    "models --store /dev/null": ["correct --store"],
    "status --store ~nobody9/place": ["home directory"],
    "promote nope --alias x --store @/store": ["nope"],
    "export absent@production @/out --store @/store": ["absent"],
    "evaluate @/small.yaml absent@production --base @/checkpoint": ["absent"],
    "evaluate @/small.yaml @/checkpoint": ["name one as the base"],
    "evaluate @/small.yaml @/checkpoint --base @/checkpoint --suite hard": [
        "has no suite 'hard'",
        "suites of small: none",
    ],
    "compare mine --store @/store": ["cannot be compared"],
    "compare mine absent --store @/store": ["no run 'absent'"],
    "sweep @/small.yaml": ["has one run"],
    **{
        f"sweep @/small.yaml --grid {grid}": [part]
        for grid, part in {
            "train.kapa=1": "did you mean 'train.kappa'",
            "train.kappa=1 --seeds ''": "--seeds",
            "train.kappa=1 --seeds [0,1]": "--seeds",
            "train.kappa=1 --seeds 1,1": "seeds",
            "train.kappa=": "is not FIELD=VALUE",
            "train.kappa=1,1": "twice",
            "inputs.test_prompts=@/good.jsonl,@/typo.jsonl": "=@/typo.jsonl: no such file",
            "seed=1,2": "set by the sweep",
        }.items()
    },
    "schedule @/small.yaml --cron '0 3 * * 1'": ["start `geb up`"],
    "init ~nobody9/place": ["home directory"],
    "init @/shadow/x": ["@/shadow/x: Not a directory"],
    "init @/letters": ["@/letters is there and not empty"],
    "up --port 99999": ["--port", "65535"],
    "up --home @/shadow --store @/store": ["@/shadow: File exists"],
    "fields trian": ["train"],
    "bandit --iterations 49": ["--iterations"],
    "bandit --out @/shadow": ["is a file"],
}


def plan_with(settings):
    """A command line that plans with settings."""
    return " ".join(["plan @/small.yaml", *(f"--set={shlex.quote(item)}" for item in settings)])


def mistakes():
    """Command lines, where @ is the place of all files, and parts of their messages."""
    rows = dict(COMMANDS)
    for settings, parts in SETTINGS.items():
        rows[plan_with(re.split(r" (?=[a-z_.]+=)", settings))] = parts
    for place, oracle in (("score", "http"), ("suites.extra.score", "judge")):
        for settings, part in SERVERS.values():
            section = {"url": "http://host", ("identity", "model")[oracle == "judge"]: "m"}
            values = {"oracle": oracle, oracle: section | settings}
            given = [f"{place}={json.dumps(values)}"]
            if place != "score":
                given.append("suites.extra.prompts=@/good.jsonl")
            rows[plan_with(given)] = [place, part.format(oracle)]
        in_docker = ["execution.runner=docker", *given]
        values = {"oracle": oracle, oracle: section}
        rows[plan_with([*in_docker, f"{place}={json.dumps(values)}"])] = [place, "network"]
        values[oracle]["key_env"] = "HOME"
        rows[plan_with([*in_docker, f"{place}={json.dumps(values)}"])] = [place, "'HOME'"]
    return rows


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A configuration, a store with one run, damaged checkpoints and prompts, other files."""
    folder = tmp_path_factory.mktemp("place")
    write_config(folder)
    run = Store.in_folder(str(folder / "store"), create=True).run_path("mine")
    for path, text in {
        run / "config.json": "{}",
        folder / "store/elsewhere/config.json": "{}",
        folder / "adapter/adapter_config.json": "{}",
        folder / "letters/letter.txt": "dear",
        folder / "shadow": "root:$6$salt: 1\n",
        folder / "extending.yaml": "extends: shadow\n",
        folder / "files/far.yaml": "extends: ../small.yaml\ninputs: {prompts: data/none.jsonl}\n",
        folder / "itself.yaml": "extends: files/back.yaml\n",
        folder / "files/back.yaml": "extends: ../itself.yaml\n",
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    system = [{"role": "system", "content": "hi"}]
    for name, rows in {
        "good": [{"prompt": "red"}],
        "empty": [],
        "held-out": [{"prompt": f"red {number}"} for number in range(16)],
        "many": [{"prompt": f"red {number}", "answer": "blue"} for number in range(40)],
        "control": [{"prompt": "red <user> blue"}],
        "number": [{"prompt": 5}],
        "picture": [{"prompt": "red", "images": ["red.png"]}],
        "no-user": [{"messages": system}],
        "answer-alone": [{"messages": [*system, {"role": "assistant", "content": "red"}]}],
    }.items():
        write_jsonl(folder / f"{name}.jsonl", rows)
    make_tiny_reward_model(folder / "reward-model")
    whole = make_tiny_llama(folder / "checkpoint")
    for name, changes in {
        "own-code": {"model_type": "chatty", "auto_map": {"AutoModelForCausalLM": "chatty.Chatty"}},
        "quantised": {"quantization_config": {"quant_method": "fp8"}},
    }.items():
        path = shutil.copytree(whole, folder / name) / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    for name, pattern in {
        "no-template": "chat_template*",
        "no-tokenizer": "tokenizer*",
        "no-weights": "*.safetensors",
        "no-config": "config.json",
    }.items():
        damaged = shutil.copytree(whole, folder / name)
        for path in damaged.glob(pattern):
            path.unlink()
    return folder


@pytest.mark.parametrize("command", mistakes(), ids=lambda command: command[:60])
def test_a_mistake_is_refused_before_a_server_starts(place, geb_here, monkeypatch, command):
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("GEB_GPUS", "0")
    monkeypatch.setenv("GEB_HOME", str(place / "home"))
    monkeypatch.chdir(place)
    monkeypatch.delattr("flows.standing.server.start_server")
    code, message = geb_here(*shlex.split(command.replace("@/", f"{place}/")))
    assert code == 64, message
    assert message.count("error ") == message.count("remedy ") == 1, message
    for part in mistakes()[command]:
        assert part.replace("@/", f"{place}/") in message
    assert "salt" not in message
    assert "SECRET" not in message
    assert not (place / "store/artifacts").exists()
    assert [path.name for path in (place / "store/runs").iterdir()] == ["mine"]
    assert [path.name for path in (place / "letters").iterdir()] == ["letter.txt"]


def test_a_run_on_preferences_is_not_asked_how_it_samples(tmp_path, geb_here):
    answer = {"role": "assistant", "content": "yes"}
    turns = [[{"role": "user", "content": f"red {number}"}, answer] for number in range(40)]
    rows = [{"chosen": chosen, "rejected": chosen} for chosen in turns]
    data = write_jsonl(tmp_path / "preferences.jsonl", rows)
    inputs = {"prompts": [], "preferences": str(data)}
    config = write_config(tmp_path, inputs=inputs, generate={"max_new_tokens": 64})
    code, message = geb_here("plan", config)
    assert code == 0, message


def test_prompts_that_only_train_need_no_reference_answers(tmp_path, geb_here):
    """The oracle scores held-out prompts, which have them."""
    held_out = [{"prompt": f"{number} · 2?", "reference_answer": "4"} for number in range(40)]
    inputs = {"test_prompts": str(write_jsonl(tmp_path / "held-out.jsonl", held_out))}
    suites = {"sums": {"score": {"oracle": "math_verify"}}}
    code, message = geb_here("plan", write_config(tmp_path, inputs=inputs, suites=suites))
    assert code == 0, message


def test_a_place_that_takes_no_folder_is_not_called_full(tmp_path):
    done = geb("run", write_config(tmp_path), "--store", "/proc/x")
    assert done.returncode == 1
    assert "/proc/x" in done.stderr and "check that the place exists" in done.stderr
    assert "no space left" not in done.stderr


@pytest.mark.slow
def test_a_full_disk_is_named_and_leaves_nothing_half_written(finished, tmp_path):
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


def test_the_errors_of_a_stage_called_by_hand_are_as_clear(tmp_path):
    (tmp_path / "request.json").write_text("{}")
    done = run_program(sys.executable, "-m", "stages.pair", tmp_path / "request.json", cwd=ROOT)
    assert done.returncode == 64
    assert "is damaged" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_wrong_data_is_refused_by_its_stage_with_paths_as_they_are(prefect_server, tmp_path):
    store, prompts = tmp_path / "[/old]" / "store", tmp_path / "prompts.jsonl"
    # The plan reads the first thousand rows.
    write_jsonl(prompts, [*({"prompt": f"{number}?"} for number in range(1000)), {"prompt": 5}])
    config = write_config(tmp_path, inputs={"prompts": [str(prompts)]})
    assert f"nothing of {store} is running" in geb("up", "--stop", "--home", store).stdout
    failed = geb("run", config, "--store", store)
    assert failed.returncode == 64, failed.stderr
    assert f"to compute; store {store}" in failed.stdout
    output = " ".join((failed.stdout + failed.stderr).split())
    # To resume reads the same settings again: it helps where a file was wrong.
    for part in ("run the same command again, or geb resume", f"--store '{store}'", "remedy"):
        assert part in output
    assert list(store.glob("artifacts/*/.scratch-*")) == []
    assert "failed" in {step["state"] for step in steps(store).values()}
