"""Steps of a run in the order of Algorithm 1 of the paper."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from flows.pipeline.config import RunConfig
from flows.pipeline.external import Externals, HubUnreachableError, unread
from flows.pipeline.grid import SweepCell
from flows.pipeline.inputs import at_commits, every_input, resolve_inputs
from flows.pipeline.preflight import check_run
from flows.pipeline.step import Output, Source, Step, step_name, suite_step_name
from flows.pipeline.steps import Samples, Sampling, Steps
from stages.contract.errors import UserError, located


@dataclass(frozen=True)
class ResolvedRun:
    """A run that can start: its configuration and its machine are checked, its inputs found.

    Attributes:
        steps: Every step, in an order in which they can be computed.
        from_step: Step that is computed again, with all that reads its artifact.
    """

    config: RunConfig
    steps: Sequence[Step]
    from_step: str | None = None


def resolve_run(config: RunConfig, from_step: str | None = None) -> ResolvedRun:
    """Finds the inputs of a run, checks what it needs of this machine, and lists its steps.

    Raises:
        UserError: An input or the step is missing, or the machine lacks something.
        HubUnreachableError: The hub cannot be asked for a revision.
    """
    inputs = resolve_inputs(config)
    check_run(config, inputs)
    steps = _steps(config, inputs)
    if from_step is not None and from_step not in (step.name for step in steps):
        raise UserError(f"the run has no step {from_step!r}", "`geb plan CONFIG` lists its steps")
    return ResolvedRun(at_commits(config), steps, from_step)


def check_cells(planned: Sequence[SweepCell]) -> None:
    """Checks each combination of a sweep before the first run starts, under one of its seeds.

    Raises:
        UserError: As :func:`resolve_run`; the message begins with the combination.
    """
    for cell in {cell.method: cell for cell in planned}.values():
        # The hub may answer again when the run starts.
        with suppress(HubUnreachableError), located(cell.method):
            resolve_run(cell.config)


def unread_steps(config: RunConfig) -> list[Step]:
    """Every step of a run, in order; its inputs are neither read nor looked for.

    The location of an input from outside replaces its content.
    """
    return _steps(config, every_input(config, unread))


def _steps(config: RunConfig, inputs: Mapping[str, Externals]) -> list[Step]:
    steps = Steps(config, inputs)
    policy = inputs[""]["policy"] or (unread("", "model"),)
    iterative_geb(steps, policy[0])
    return steps.listed


def iterative_geb(steps: Steps, start: Source) -> None:
    """Lists T iterations of generate → score → pair → train → evaluate → promote.

    A supervised warm start, if there is one, makes the first policy of ``start``.
    """
    config = steps.config
    prompts = steps.prepare()
    warm = config.inputs.warm_start
    base = steps.warm_start().at("checkpoint") if warm else start
    evaluation = steps.for_evaluation()
    test_prompts = prompts.at("test.parquet")
    base_samples = sample_and_score(steps, "base", evaluation, base, test_prompts)
    suites = _base_of_suites(steps, base, test_prompts, base_samples)
    train_prompts = {
        iteration: _train_prompts(steps, iteration, base, prompts)
        for iteration in range(1, config.iterations + 1)
    }
    policy = reference = base
    history: list[Output] = []
    promoted: Output | None = None
    for iteration in range(1, config.iterations + 1):
        prefix = f"iteration-{iteration}"
        table = train_prompts[iteration]
        if config.inputs.preferences:
            paired = steps.preferences(iteration, table, base)
        else:
            training = steps.for_training(iteration)
            samples = sample_and_score(steps, prefix, training, policy, table)
            paired = steps.pair(iteration, samples)
        history.append(paired.at("pairs.parquet"))
        pairs = history if config.pair_data == "accumulate" else history[-1:]
        trained = steps.train(iteration, policy, reference, pairs)
        policy = trained.at("checkpoint")
        if config.train.reference == "previous":
            reference = policy
        evaluate = step_name(iteration, "evaluate")
        policy_samples = sample_and_score(
            steps, evaluate, evaluation, policy, test_prompts, base_samples
        )
        metrics = steps.evaluate(evaluate, policy_samples, base_samples, base)
        of_suites = _run_suites(config, suites, iteration, policy, base, policy_samples)
        promoted = steps.promote(iteration, policy, metrics.at("metrics.json"), promoted, of_suites)


def sample_and_score(
    steps: Steps,
    prefix: str,
    sampling: Sampling,
    policy: Source,
    prompts: Source,
    base: Samples | None = None,
    sampled: Samples | None = None,
) -> Samples:
    """Samples responses to a table of prompts and scores them, shard by shard.

    A judge that compares sets the responses against ``base``'s, sample by sample, so that ½
    means as good as those; without ``base``, against themselves. With ``sampled``, these responses
    are scored once more, and none are sampled.
    """
    samples = Samples()
    for shard in range(sampling.params.num_shards):
        if sampled is None:
            generated = steps.generate(prefix, shard, sampling, policy, prompts)
            samples.responses.append(generated.at("responses.parquet"))
        else:
            samples.responses.append(sampled.responses[shard])
        opponents = (base or samples).responses[shard] if sampling.against_opponents else None
        scores = steps.score(prefix, shard, samples.responses[-1], opponents)
        samples.scores.append(scores.at("scores.parquet"))
    return samples


@dataclass(frozen=True)
class _Suite:
    """A suite's steps, its prompts, and the base's answers to them."""

    steps: Steps
    prompts: Output
    base_samples: Samples


def _base_of_suites(
    steps: Steps, base: Source, test_prompts: Output, base_samples: Samples
) -> dict[str, _Suite]:
    """Samples and scores the base's responses to the prompts of each suite, once for all.

    A suite without prompts scores the responses to the held-out prompts once more.
    """
    suites = {}
    for name, suite in steps.config.suites.items():
        suite_steps = steps.of_suite(name)
        place = suite_step_name("base", name)
        prompts = test_prompts
        sampled: Samples | None = base_samples
        if suite.prompts is not None:
            prompts = suite_steps.prepare(f"{place}/prepare").at("test.parquet")
            sampled = None
        sampling = suite_steps.for_evaluation()
        samples = sample_and_score(suite_steps, place, sampling, base, prompts, sampled=sampled)
        suites[name] = _Suite(suite_steps, prompts, samples)
    return suites


def _run_suites(
    config: RunConfig,
    suites: Mapping[str, _Suite],
    iteration: int,
    policy: Source,
    base: Source,
    policy_samples: Samples,
) -> dict[str, Output]:
    """Metrics, by the suites' names, of policy against base on those due after an iteration.

    Suites without prompts score ``policy_samples``, its responses to the held-out prompts.
    """
    metrics = {}
    for name, suite in suites.items():
        if config.suites[name].after == "last" and iteration < config.iterations:
            continue
        prefix = step_name(iteration, "evaluate", name)
        sampling = suite.steps.for_evaluation()
        sampled = policy_samples if config.suites[name].prompts is None else None
        samples = sample_and_score(
            suite.steps, prefix, sampling, policy, suite.prompts, suite.base_samples, sampled
        )
        evaluated = suite.steps.evaluate(prefix, samples, suite.base_samples, base)
        metrics[name] = evaluated.at("metrics.json")
    return metrics


def _train_prompts(steps: Steps, iteration: int, base: Source, prompts: Output) -> Output:
    """D_t, without the prompts that the starting policy solves if those are screened."""
    table = prompts.at(f"iteration-{iteration}.parquet")
    if steps.config.screen.num_samples == 0:
        return table
    samples = sample_and_score(
        steps,
        f"screen/iteration-{iteration}",
        steps.for_screening(iteration),
        base,
        table,
    )
    return steps.screen(iteration, table, samples).at("prompts.parquet")
