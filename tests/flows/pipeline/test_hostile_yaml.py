"""Hostile configuration files: refused with one short message."""

import pytest

from flows.pipeline.loading import load_config
from flows.pipeline.strict_yaml import parse_yaml
from stages.contract.errors import UserError

_BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 9)
)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (_BOMB, ["more than 20 aliases"]),
        ("train:\n  kappa: 1\n  beta: 1\n  kappa: 2\n", ['duplicate key "kappa"', "line 4"]),
        ("train: {learning_rate: .inf}\n", ["train.learning_rate", "finite"]),
        ("train: {beta: .nan}\n", ["train.beta", "finite"]),
        (b"name: caf\xe9\n", ["is not UTF-8 text", "0xe9"]),
        ("a: " + "[" * 60 + "]" * 60, ["a: no such setting"]),
        ("a: " + "[1, " * 300 + "]" * 300, ["is nested too deep"]),
        ("x: &a [*a]\n", ["is not valid YAML"]),
        ("x: !!set {a, b}\n", ["is not valid YAML"]),
        (f"# {'x' * 1_000_000}\nseed: 1\n", ["more than 1000000"]),
        ("generate: {chat_template_args: {x: .inf}}\n", ["Out of range float"]),
        ("store: ~nouser/store\n", ["~nouser/store"]),
        ("execution: {docker: {mounts: {~nouser/a: ro}}}\n", ["~nouser/a"]),
        ("extends: 5\n", ["extends names no files: 5"]),
        ("iterations: 1000000000\n", ["iterations", "1000"]),
        (f"name: {'x' * 100_000}\n", ["name", "at most 100"]),
        ("5\n", ["holds no settings"]),
        ("iterations: true\n", ["iterations: a number is wanted"]),
        ("train: {kappa: true}\n", ["train.kappa: a number is wanted"]),
        ("inputs: {prompts: ''}\n", ["inputs.prompts"]),
        ("store: ' '\n", ["' ' does not name a store"]),
        ('store: "a\\0b"\n', ["has a NUL"]),
        ("".join(f"x{number}: 1\n" for number in range(3000)), ["x0: no such", "and 2980 more"]),
        ("1: 2\n", ["1: "]),
    ],
    ids=lambda value: None if isinstance(value, list) else str(value)[:30],
)
def test_it_is_refused_by_name(tmp_path, text, parts):
    path = tmp_path / "config.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError) as caught:
        load_config(path)
    message = caught.value.message
    assert len(message) < 8000
    for part in parts:
        assert part in message
    assert caught.value.remedy


def test_set_on_an_anchor_leaves_its_alias_as_it_was(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("resources:\n  generate: &host {cpus: 1}\n  score: *host\n")
    config = load_config(path, ["resources.generate.cpus=2"])
    assert (config.resources.generate.cpus, config.resources.score.cpus) == (2, 1)


def test_a_merge_key_may_be_overridden(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        "resources:\n  generate: &host {cpus: 1, gpus: 0}\n  score: {<<: *host, cpus: 2}\n"
    )
    config = load_config(path)
    assert (config.resources.generate.cpus, config.resources.score.cpus) == (1, 2)


@pytest.mark.parametrize("word", ["off", "Off", "no", "on", "yes"])
def test_words_are_words_and_truth_values_take_them(tmp_path, word):
    path = tmp_path / "run.yaml"
    path.write_text(f"name: {word}\nmodel: truest\ntrain: {{gradient_checkpointing: {word}}}\n")
    config = load_config(path)
    assert config.name == word
    assert config.train.gradient_checkpointing is (word in ("on", "yes"))


def test_plain_values_are_read_as_yaml_1_2():
    assert parse_yaml(r"'a\u0000'", "here") == r"a\u0000"
    values = [0.001, 10, 16, "1:30", "2026-11-26", "off"]
    assert parse_yaml("[1e-3, 010, 0x10, 1:30, 2026-11-26, off]", "here") == values
