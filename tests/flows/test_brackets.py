"""Paths with brackets, which are the terminal's markup, in what commands say."""

from pathlib import Path

from tests.flows.loop import geb, write_config


def test_what_a_command_says_has_paths_as_they_are(tmp_path: Path) -> None:
    store, prompts = tmp_path / "[/old]" / "store", tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": 5}\n')
    config = write_config(tmp_path, inputs={"prompts": [str(prompts)]})
    assert f"nothing of {store} is running" in geb("down", "--home", store).stdout
    failed = geb("run", config, "--store", store)
    assert failed.returncode == 64, failed.stderr
    assert f"to compute; store {store}" in failed.stdout
    assert f"--store '{store}'" in failed.stdout + failed.stderr
