"""Checks of settings against each other, before anything is read or started."""

from operator import attrgetter

from flows.pipeline.config import SET_BY_THE_RUN, RunConfig, changed_fields
from stages.score.params import ScoreParams

UNNAMED = "JUDGE"
"""Model in shipped configurations that a person has to choose."""


# Settings of `execution` by the names of stages.
_BY_STAGE = (
    "interpreters",
    "slurm.stages",
    "kubernetes.stages",
    "docker.images",
    "docker.network",
    "docker.environment",
    "docker.secrets",
)


def check(config: RunConfig) -> None:
    """Refuses settings that do not go together.

    Raises:
        ValueError: The first that do not; the message names them and the remedy.
    """
    _check_whole(config)
    _check_samples(config)
    _check_suites(config)
    _check_judges(config)
    _check_devices(config)
    _check_nodes(config)
    _check_stage_names(config)


def _check_whole(config: RunConfig) -> None:
    for holder in (config, *config.suites.values()):
        for section, names in SET_BY_THE_RUN.items():
            for name in changed_fields(getattr(holder, section, None), names):
                raise ValueError(f"{section}.{name} is set by the run; leave it out")
    sources = len(config.inputs.prompts)
    if sources > 1 and sources != config.iterations:
        raise ValueError(
            f"inputs.prompts names {sources} sources, and iterations is {config.iterations}: "
            f"name one, which is split, or {config.iterations}, one for each iteration"
        )
    if config.sft.lora.rank and not config.inputs.policy:
        raise ValueError(
            f"sft.lora.rank is {config.sft.lora.rank}, and inputs.policy is not set: adapters "
            "leave a new model's weights as they are, random; leave sft.lora out"
        )


def _check_samples(config: RunConfig) -> None:
    """Refuses samples that later stages of an iteration cannot use."""
    needed = 2 * config.pair.pairs_per_prompt
    if config.generate.num_samples < needed:
        raise ValueError(
            f"generate.num_samples is {config.generate.num_samples}, and pair.pairs_per_prompt "
            f"{config.pair.pairs_per_prompt}: no response is in two pairs, so that it takes "
            f"{needed} samples; raise num_samples, or lower pairs_per_prompt"
        )
    if not config.generate.temperature:
        raise ValueError(
            "generate.temperature is 0: all responses to a prompt are the same, and pairs need "
            "different ones; raise it (1.0 is the default)"
        )


def _check_suites(config: RunConfig) -> None:
    """Refuses tries that cannot be counted, and gates without their metrics."""
    for settings in config.parts().values():
        evaluation = settings.evaluation
        if evaluation.pass_at_k and evaluation.correct_from is None:
            raise ValueError(
                "pass_at_k is set and correct_from is not: set the smallest score of a correct "
                "response (1 for the oracle math_verify)"
            )
        for k in evaluation.pass_at_k:
            if not 1 <= k <= evaluation.num_samples:
                raise ValueError(
                    f"pass_at_k has {k}, and num_samples is {evaluation.num_samples}: it takes at "
                    "least k samples a prompt; raise num_samples, or leave it out"
                )
    for name in config.promote.suites_hold:
        if name not in config.suites:
            raise ValueError(
                f"promote.suites_hold names {name}, and suites are: "
                f"{', '.join(config.suites) or 'none'}"
            )
        if config.suites[name].after == "last" and config.iterations > 1:
            raise ValueError(
                f"promote.suites_hold names {name}, which is evaluated after the last iteration "
                f"only: set suites.{name}.after to each"
            )


def oracles(config: RunConfig) -> dict[str, ScoreParams]:
    """The oracles of the run and its suites, by their sections' names."""
    return {
        f"suites.{name}.score" if name else "score": part.score
        for name, part in config.parts().items()
    }


def _check_judges(config: RunConfig) -> None:
    for section, score in oracles(config).items():
        if "judge" in score.parts and score.judge.model == UNNAMED:
            raise ValueError(
                f"{section}.judge.model is {UNNAMED}: choose a judge, and set "
                f"{section}.judge.model and {section}.judge.url to its "
                "name and its OpenAI-compatible server"
            )


def _check_devices(config: RunConfig) -> None:
    """Refuses more or fewer devices than a call of a stage takes; training takes any number."""
    is_vllm = config.generate.backend == "vllm"
    engine = config.generate.vllm.tensor_parallel_size if is_vllm else 1
    for stage, taken in (("generate", engine), ("score", 1), ("evaluate", 1)):
        devices = getattr(config.resources, stage).devices
        if devices != taken:
            raise ValueError(
                f"resources.{stage} asks for {devices} devices, and {stage} takes {taken} (vLLM: "
                "generate.vllm.tensor_parallel_size): set its gpus, or on CPUs its processes, to "
                f"{taken}; generate.num_shards spreads the work of generate and "
                "score over several calls"
            )


def _check_nodes(config: RunConfig) -> None:
    """Refuses several nodes if nothing would start the others, or they could not meet."""
    for stage, resources in config.resources:
        nodes = resources.nodes
        if nodes == 1:
            continue
        obstacle = ""
        if stage not in ("sft", "train"):
            obstacle = (
                "only sft and train work on several nodes: leave it out; generate.num_shards "
                "spreads the work of generate and score over several machines"
            )
        elif "://" in config.store:
            obstacle = (
                f"the store {config.store} is in a bucket: the nodes meet in the work folder, so "
                "put the store on a file system that all see"
            )
        elif config.execution.runner == "docker":
            obstacle = "the runner docker starts one: leave it out"
        if obstacle:
            raise ValueError(f"resources.{stage}.nodes is {nodes}, and {obstacle}")


def _check_stage_names(config: RunConfig) -> None:
    """Refuses settings of `execution` for unknown stages."""
    stages = list(type(config.resources).model_fields)
    for name in _BY_STAGE:
        unknown = attrgetter(name)(config.execution).keys() - set(stages)
        if unknown:
            raise ValueError(
                f"execution.{name} names no stage: {', '.join(sorted(unknown))}; stages are "
                f"{', '.join(stages)}"
            )
