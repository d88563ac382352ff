"""Checks of what a run needs of this machine, before any stage starts."""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from flows.pipeline.checks import oracles
from flows.pipeline.config import RunConfig
from flows.pipeline.external import External
from flows.pipeline.inputs import suite_input
from flows.pipeline.placement import EVAL
from stages.contract.checkpoints import check_checkpoint, read_settings
from stages.contract.errors import UserError
from stages.contract.request import FileInput
from stages.score.params import ORACLES

# Where transformers keeps a chat template that is not in the tokenizer's configuration.
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")


def check_checkpoints(config: RunConfig, external: Mapping[str, Sequence[External]]) -> None:
    """Checks the files of local checkpoints; stages check models of the hub.

    Raises:
        UserError: One is damaged or missing, or has no chat template, or is an adapter.
    """
    places = {"inputs.policy": "policy", "inputs.oracle_model": "oracle_model"}
    # A suite without an oracle has the run's.
    places |= {
        each: each for each in (suite_input(suite, "oracle_model") for suite in config.suites)
    }
    for place, name in places.items():
        # A warm start may bring the template.
        has_to_render = name != "policy" or config.inputs.warm_start is None
        for each in external[name]:
            if not isinstance(each, FileInput):
                continue
            folder = Path(each.location)
            try:
                check_checkpoint(folder)
            except UserError as error:
                raise error.at(place) from error
            if has_to_render and not _has_chat_template(folder):
                raise UserError(
                    f"{place}: the checkpoint {folder} has no chat template",
                    "use an instruction-tuned checkpoint, or save one with "
                    "tokenizer.chat_template set",
                )


def check_environment(config: RunConfig) -> None:
    """Checks that interpreters and servers' keys are there, where stages run on this machine.

    Raises:
        UserError: One is not, or none is named for what this interpreter does not have.
    """
    execution = config.execution
    if execution.runner != "process":
        return
    metrics = [suite.evaluate for suite in config.suites.values() if suite.evaluate]
    if any(each.length_controlled for each in metrics) and EVAL not in execution.interpreters:
        raise UserError(
            "a length-controlled win rate needs AlpacaEval's code, and no interpreter that has it "
            "is named",
            "run `make setup-eval`, and set execution.interpreters.eval to its "
            ".venv-eval/bin/python",
        )
    for stage, interpreter in execution.interpreters.items():
        require_interpreter(stage, interpreter)
    for place, score in oracles(config).items():
        for part in score.parts:
            name = getattr(getattr(score, ORACLES[part].section, None), "key_env", None)
            if name is not None and not os.environ.get(name):
                raise UserError(
                    f"{place}.{part}.key_env is {name!r}, and that environment variable is not set",
                    "export it with the key, or correct the name",
                )


def require_interpreter(stage: str, interpreter: str) -> None:
    """Refuses a stage's Python interpreter that is not there, by its path or on PATH."""
    if shutil.which(interpreter) is None:
        raise UserError(
            f"no Python interpreter at {interpreter} for stage {stage!r}",
            f"run `make setup-{'eval' if stage == EVAL else 'vllm'}`, or correct "
            "execution.interpreters",
        )


def _has_chat_template(folder: Path) -> bool:
    by_itself = any((folder / name).exists() for name in _TEMPLATE_FILES)
    return by_itself or bool(read_settings(folder / "tokenizer_config.json").get("chat_template"))
