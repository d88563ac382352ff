"""Checks of what a run needs of this machine, before any stage starts."""

import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from flows.pipeline.checks import oracles
from flows.pipeline.config import RunConfig
from flows.pipeline.external import Externals
from flows.pipeline.placement import PACKAGES
from stages.contract.checkpoints import check_checkpoint, read_settings
from stages.contract.data_files import read_data_file
from stages.contract.errors import UserError, located
from stages.contract.request import FileInput, Input
from stages.preferences.params import PreferencesParams
from stages.preferences.rows import read_preference
from stages.prepare.params import PrepareParams
from stages.prepare.prompts import Prompt, read_prompt
from stages.score.params import ORACLES, ServerSettings
from stages.score.template import read_template
from stages.sft.rows import read_conversation

_CHECKED_ROWS = 1000
# Where transformers keeps a chat template that is not in the tokenizer's configuration.
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")


def check_run(config: RunConfig, inputs: Mapping[str, Externals]) -> None:
    """Checks what a run needs of this machine; UserError if that is not there."""
    _check_checkpoints(config, inputs)
    check_data(config, inputs)
    check_templates(config, inputs)
    _check_context(config, inputs[""])
    check_environment(config)
    for tracker in config.tracking.report_to:
        package = PACKAGES[tracker]
        if find_spec(package) is None:
            raise UserError(
                f"tracking.report_to: {package} is not installed",
                f"install it into the environment of geb: pip install {package}",
            )


def _check_checkpoints(config: RunConfig, inputs: Mapping[str, Externals]) -> None:
    """Checks the files of local checkpoints; stages check models of the hub.

    Raises:
        UserError: One is damaged or missing, has no chat template, is an adapter, or is a model of
            the wrong kind.
    """
    for suite, external in inputs.items():
        for name in ("policy", "oracle_model"):
            setting = f"suites.{suite}.{name}" if suite else f"inputs.{name}"
            # A warm start may bring the template.
            has_to_render = name != "policy" or config.inputs.warm_start is None
            for folder in _local(external[name]):
                _check_checkpoint(setting, folder, has_to_render)


def _check_checkpoint(setting: str, folder: Path, has_to_render: bool) -> None:
    with located(setting):
        check_checkpoint(folder)
    _check_kind(setting, folder)
    if has_to_render and not _has_chat_template(folder):
        raise UserError(
            f"{setting}: the checkpoint {folder} has no chat template",
            "use an instruction-tuned checkpoint, or save one with tokenizer.chat_template set",
        )


def _local(sources: Sequence[Input]) -> list[Path]:
    """Files and folders of this machine among the inputs."""
    return [Path(source.location) for source in sources if isinstance(source, FileInput)]


def _check_kind(setting: str, folder: Path) -> None:
    """Refuses models with code, a quantised policy, and policy and reward model interchanged."""
    wrong = "ForSequenceClassification" if setting.endswith("policy") else "ForCausalLM"
    config = read_settings(folder / "config.json")
    library = find_spec("transformers")
    if "auto_map" in config and library is not None and library.origin is not None:
        name = config["model_type"].replace("-", "_")
        if not (Path(library.origin).parent / "models" / name).is_dir():
            raise UserError(
                f"{setting}: the checkpoint {folder} brings Python code for {name!r}, "
                "and such code is never run",
                "use a model that transformers knows",
            )
    if setting.endswith("policy") and "quantization_config" in config:
        raise UserError(
            f"{setting}: the checkpoint {folder} is quantised, and such weights cannot be trained",
            "name the weights of 16 or 32 bits; generate.vllm.extra_engine_args: "
            "{quantization: fp8} samples from them in eight",
        )
    for name in config.get("architectures") or ():
        if str(name).endswith(wrong):
            raise UserError(
                f"{setting}: the checkpoint {folder} is a {name}",
                "name a causal language model as the policy, and a sequence classifier as the "
                "reward model",
            )


def check_data(config: RunConfig, inputs: Mapping[str, Externals]) -> None:
    """Reads the first rows of local data files as their stages will.

    Raises:
        UserError: A row cannot be read, a prompt spells control tokens of the policy, or no prompt
            has the reference answer that an oracle needs.
    """
    external = inputs[""]
    control_tokens = _control_tokens(config, external)
    sources: dict[str, list[Input]] = {}
    prompts: dict[str, list[Prompt]] = {}
    for suite, part in config.parts().items():
        sources[suite] = [*inputs[suite]["prompts"], *inputs[suite]["test_prompts"]]
        prompts[suite] = _first_prompts(part.prepare, sources[suite], control_tokens)
        # A suite that names no prompts scores the run's.
        origin = suite if sources[suite] else ""
        is_read = len(_files(sources[origin])) == len(sources[origin])
        if part.score.needs_references and is_read:
            _require_references(suite, origin, prompts[origin])
    _check_rows(external["warm_start"], read_conversation)
    read = partial(read_preference, params=PreferencesParams())
    _check_rows(external["preferences"], read, config.prepare.invalid_rows)


def _first_prompts(
    params: PrepareParams, sources: Sequence[Input], control_tokens: Sequence[str]
) -> list[Prompt]:
    """The first prompts of local files; UserError as :func:`check_data`."""

    def read(row: dict[str, Any]) -> Prompt:
        prompt = read_prompt(row, params, columns=())
        text = "\n".join(turn["content"] for turn in prompt.messages)
        for token in control_tokens:
            if token in text:
                raise UserError(
                    f"the prompt spells a control token of the policy: {token!r}",
                    "remove it from the text, or set generate.allow_control_tokens to true",
                )
        return prompt

    return _check_rows(sources, read, params.invalid_rows)


def _require_references(suite: str, origin: str, prompts: Sequence[Prompt]) -> None:
    """Refuses prompts of ``origin`` for a suite's oracle if none has a reference answer."""
    if all(prompt.reference is None for prompt in prompts):
        oracle = f"suites.{suite}.score" if suite else "score"
        reading = f"suites.{origin}.prepare" if origin else "prepare"
        raise UserError(
            f"{oracle}.oracle needs reference answers, and none of the first {len(prompts)} "
            "prompts has one",
            f"set {reading}.reference_column to the column that holds them",
        )


def _control_tokens(config: RunConfig, external: Externals) -> list[str]:
    """Special tokens of a local policy that its prompts must not spell."""
    if config.generate.allow_control_tokens:
        return []
    special = []
    for folder in _local(external["policy"]):
        for token in read_settings(folder / "tokenizer.json").get("added_tokens") or ():
            text = str(token["content"])
            if token.get("special") and text.strip():
                special.append(text)
    return special


def _check_rows(
    sources: Sequence[Input], read: Callable[[dict[str, Any]], Any], invalid: str = "refuse"
) -> list[Any]:
    """Reads the first rows of each local file; returns what they were read as."""
    rows = []
    for path in _files(sources):
        for position, row in islice(read_data_file(path), _CHECKED_ROWS):
            try:
                with located(position):
                    rows.append(read(row))
            except UserError:
                if invalid == "refuse":
                    raise
    return rows


def _files(sources: Sequence[Input]) -> list[Path]:
    return [path for path in _local(sources) if path.is_file()]


def check_templates(config: RunConfig, inputs: Mapping[str, Externals]) -> None:
    """Reads local templates of judges; UserError as :func:`read_template`."""
    for suite, part in config.parts().items():
        # Beside an oracle that needs a file of code, a judge has the default template.
        if "judge" in part.score.parts and "code" not in part.score.needs:
            for path in _local(inputs[suite]["oracle_code"]):
                read_template(path, part.score.judge.mode)


def _check_context(config: RunConfig, external: Externals) -> None:
    """Refuses more tokens than the context has, and responses without room for a prompt in it."""
    context = None
    if config.inputs.policy is None:
        context = config.sft.architecture.max_position_embeddings
    for folder in _local(external["policy"]):
        context = read_settings(folder / "config.json").get("max_position_embeddings")
    limit = config.generate.max_length_tokens
    if limit and isinstance(context, int) and limit > context:
        raise UserError(
            f"generate.max_length_tokens is {limit}, and the policy's context has {context} tokens",
            f"set generate.max_length_tokens to {context} or less, or leave it out",
        )
    context = limit or context
    # With preferences nothing is sampled for training.
    longest = {} if config.inputs.preferences else {"generate": config.generate.max_new_tokens}
    for suite, part in config.parts().items():
        section = f"suites.{suite}.evaluation" if suite else "evaluation"
        longest[section] = part.evaluation.max_new_tokens
    for section, tokens in longest.items():
        if isinstance(context, int) and tokens >= context:
            setting = f"{section}.max_new_tokens"
            raise UserError(
                f"{setting} is {tokens}, and the context has {context} tokens",
                f"lower {setting}",
            )


def check_environment(config: RunConfig) -> None:
    """Checks that interpreters and servers' keys are there, where stages run on this machine.

    Raises:
        UserError: One is not, or none is named for what this interpreter does not have.
    """
    execution = config.execution
    if execution.runner != "process":
        return
    for stage, interpreter in execution.interpreters.items():
        require_interpreter(stage, interpreter)
    if not execution.interpreters and find_spec("torch") is None:
        raise UserError(
            "stages run in this environment, which has no torch",
            "pip install 'geb[torch]', or name execution.interpreters or another execution.runner",
        )
    variables = {name for name, value in os.environ.items() if value}
    check_servers(config, variables, has_network=True)


def check_servers(config: RunConfig, variables: Collection[str], *, has_network: bool) -> None:
    """Checks that the stage `score` has the keys of its servers, and a network to reach them."""
    for section, score in oracles(config).items():
        for part in score.parts:
            server = getattr(score, ORACLES[part].section, None)
            if not isinstance(server, ServerSettings):
                continue
            if server.key_env is not None and server.key_env not in variables:
                raise UserError(
                    f"{section}.{part}.key_env is {server.key_env!r}, and that environment "
                    "variable is not set",
                    "export it with the key, or correct the name; name it in "
                    "execution.docker.secrets.score if stages are containers",
                )
            if not has_network:
                raise UserError(
                    f"the oracle {part} of {section} asks a server, and its container has no "
                    "network",
                    "set execution.docker.network.score to a Docker network (`bridge`)",
                )


def require_interpreter(stage: str, interpreter: str) -> None:
    """Refuses a stage's Python interpreter that is not there, by its path or on PATH."""
    if shutil.which(interpreter) is None:
        raise UserError(
            f"no Python interpreter at {interpreter} for stage {stage!r}",
            "run `make setup-vllm` or `make setup-eval`, or correct execution.interpreters",
        )


def _has_chat_template(folder: Path) -> bool:
    if any((folder / name).exists() for name in _TEMPLATE_FILES):
        return True
    return bool(read_settings(folder / "tokenizer_config.json").get("chat_template"))
