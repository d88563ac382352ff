"""Paths in a configuration: each is relative to the file, or the folder, that names it."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from stages.contract.errors import UserError

_MODELS_AND_FILES = ("policy", "test_prompts", "warm_start", "oracle_model", "oracle_code")
_OF_SUITES = ("prompts", "oracle_model", "oracle_code")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
_FILE_SUFFIXES = (".jsonl", ".json", ".parquet", ".py", ".jinja", ".yaml", ".txt")


def anchor_paths(values: dict[str, Any], folder: Path) -> None:
    """Makes the paths of nested settings absolute; hub ids, URLs and commands stay as they are.

    What is no text stays as well: validation says what is wrong with it.

    Args:
        values: Sections and fields as in a configuration file; changed in place.
        folder: Where relative paths start.

    Raises:
        UserError: A path names the home folder of nobody.
    """
    if _is_path(values.get("store")) and "://" not in values["store"]:
        values["store"] = _absolute(values["store"], folder, "store")
    inputs = values.get("inputs")
    if isinstance(inputs, dict):
        _anchor_inputs(inputs, folder)
    suites = values.get("suites")
    for suite in suites.values() if isinstance(suites, dict) else ():
        if isinstance(suite, dict):
            for name in _OF_SUITES:
                if name in suite:
                    suite[name] = _input(suite[name], folder, name)
    execution = values.get("execution")
    if isinstance(execution, dict):
        _anchor_execution(execution, folder)


def _anchor_inputs(inputs: dict[str, Any], folder: Path) -> None:
    for name in _MODELS_AND_FILES:
        if name in inputs:
            inputs[name] = _input(inputs[name], folder, name)
    prompts = inputs.get("prompts")
    if isinstance(prompts, str):
        prompts = [prompts]
    if isinstance(prompts, list):
        inputs["prompts"] = [_input(each, folder, "prompts") for each in prompts]


def _anchor_execution(execution: dict[str, Any], folder: Path) -> None:
    interpreters = execution.get("interpreters")
    if isinstance(interpreters, dict):
        for stage, place in interpreters.items():
            # A name without a folder is a command on the path.
            if _is_path(place) and os.sep in place:
                interpreters[stage] = _absolute(place, folder, f"execution.interpreters.{stage}")
    docker = execution.get("docker")
    if isinstance(docker, dict):
        if _is_path(docker.get("model_cache")):
            docker["model_cache"] = _absolute(docker["model_cache"], folder, "model_cache")
        if isinstance(docker.get("mounts"), dict):
            docker["mounts"] = {
                _absolute(place, folder, "mounts") if _is_path(place) else place: mode
                for place, mode in docker["mounts"].items()
            }

    kubernetes = execution.get("kubernetes")
    if isinstance(kubernetes, dict):
        if _is_path(kubernetes.get("kubeconfig")):
            kubernetes["kubeconfig"] = _absolute(kubernetes["kubeconfig"], folder, "kubeconfig")
        if isinstance(kubernetes.get("volumes"), dict):
            kubernetes["volumes"] = {
                _absolute(place, folder, "volumes") if _is_path(place) else place: claim
                for place, claim in kubernetes["volumes"].items()
            }


def _input(place: Any, folder: Path, name: str) -> Any:
    if not _is_path(place):
        return place
    path = _absolute(place, folder, f"inputs.{name}")
    looks_remote = _HUB_ID.fullmatch(place) and not place.startswith((".", "~"))
    looks_remote = looks_remote and not place.endswith(_FILE_SUFFIXES)
    return place if looks_remote and not Path(path).exists() else path


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _absolute(place: str, folder: Path, name: str) -> str:
    """The path without ``..``; links stay, since an environment's interpreter is one."""
    try:
        return os.path.normpath(folder.absolute() / Path(place).expanduser())
    except RuntimeError as error:
        raise UserError(f"{name}: {json.dumps(place)}: {error}", "write the folder out") from error
