"""Algorithm 1 of the paper, over steps."""

from collections.abc import Callable, Mapping

from flows.pipeline.config import RunConfig
from flows.pipeline.external import unread
from flows.pipeline.inputs import every_input, resolve_inputs, unread_input
from flows.pipeline.preflight import check_checkpoints, check_environment
from flows.pipeline.step import Model, Output, Source, Step
from flows.pipeline.steps import Samples, Sampling, Steps, suite_place
from flows.pipeline.tracking import check_trackers

Do = Callable[[Step], Output]


def iterative_geb(config: RunConfig, steps: Steps, start: Source | None, do: Do) -> None:
    """Runs T iterations of generate → score → pair → train → evaluate → promote.

    Without ``start``, the first policy is made by supervised warm start. ``do`` takes a step in
    hand and returns its output at once; the executor sees to the order that the inputs demand.
    """
    prompts = do(steps.prepare())
    first = do(steps.warm_start()).at("checkpoint") if config.inputs.warm_start else start
    assert first is not None
    base = Model(first)
    evaluation = steps.for_evaluation()
    test_prompts = prompts.at("test.parquet")
    base_samples = sample_and_score(steps, do, "base", evaluation, base, test_prompts)
    suites = _base_of_suites(config, steps, do, base, test_prompts, base_samples)
    train_prompts = {
        iteration: _train_prompts(config, steps, do, iteration, base, prompts)
        for iteration in range(1, config.iterations + 1)
    }
    policy = reference = base
    history: list[Output] = []
    promoted: Output | None = None
    for iteration in range(1, config.iterations + 1):
        place = f"iteration-{iteration}"
        table = train_prompts[iteration]
        if config.inputs.preferences:
            paired = do(steps.preferences(iteration, table, base))
        else:
            training = steps.for_training(iteration)
            samples = sample_and_score(steps, do, place, training, policy, table)
            paired = do(steps.pair(iteration, samples))
        history.append(paired.at("pairs.parquet"))
        pairs = history if config.pair_data == "accumulate" else history[-1:]
        trained = do(steps.train(iteration, policy, reference, pairs))
        policy = steps.trained(policy, trained)
        # "initial" stays what it is.
        match config.train.reference:
            case "previous":
                reference = policy
            case "ema":
                reference = Model(trained.at("ema"))
            case int(period) if iteration % period == 0:
                reference = policy
        evaluate = f"{place}/evaluate"
        own = sample_and_score(steps, do, evaluate, evaluation, policy, test_prompts, base_samples)
        metrics = do(steps.evaluate(evaluate, own, base_samples, base, policy))
        of_suites = _run_suites(config, suites, do, iteration, policy, base, own)
        gates = metrics.at("metrics.json"), promoted, of_suites
        promoted = do(steps.promote(iteration, policy, *gates))


def sample_and_score(
    steps: Steps,
    do: Do,
    place: str,
    sampling: Sampling,
    policy: Model,
    prompts: Source,
    base: Samples | None = None,
    sampled: Samples | None = None,
) -> Samples:
    """Samples responses to a table of prompts and scores them, shard by shard.

    A judge that compares sets the responses against those of ``base``, sample by sample, so that ½
    means as good as those; without ``base``, against themselves. With ``sampled``, these responses
    are scored once more, and none are sampled.
    """
    samples = Samples()
    for shard in range(sampling.params.num_shards):
        if sampled is None:
            made = do(steps.generate(place, shard, sampling, policy, prompts))
            samples.responses.append(made.at("responses.parquet"))
        else:
            samples.responses.append(sampled.responses[shard])
        opponents = (base or samples).responses[shard] if sampling.against_opponents else None
        scores = do(steps.score(place, shard, samples.responses[-1], opponents))
        samples.scores.append(scores.at("scores.parquet"))
    return samples


_Suite = tuple[Steps, Output, Samples]
"""A suite's steps, its prompts, and the base's answers to them."""


def _base_of_suites(
    config: RunConfig, steps: Steps, do: Do, base: Model, held_out: Output, base_samples: Samples
) -> dict[str, _Suite]:
    """Samples and scores the base's responses to the prompts of each suite, once for all.

    A suite without prompts scores the responses to the held-out prompts once more.
    """
    suites = {}
    for name, suite in config.suites.items():
        own = steps.of_suite(name)
        place = suite_place("base", name)
        prompts = held_out
        sampled = base_samples if suite.prompts is None else None
        if suite.prompts is not None:
            prompts = do(own.prepare(f"{place}/prepare")).at("test.parquet")
        sampling = own.for_evaluation()
        samples = sample_and_score(own, do, place, sampling, base, prompts, sampled=sampled)
        suites[name] = own, prompts, samples
    return suites


def _run_suites(
    config: RunConfig,
    suites: Mapping[str, _Suite],
    do: Do,
    iteration: int,
    policy: Model,
    base: Model,
    held_out: Samples,
) -> dict[str, Output]:
    """Metrics, by the suites' names, of policy against base on those due after an iteration.

    Suites without prompts score ``held_out``, the policy's responses to the held-out prompts.
    """
    found = {}
    for name, (own, prompts, base_samples) in suites.items():
        if config.suites[name].after == "last" and iteration < config.iterations:
            continue
        place = suite_place(f"iteration-{iteration}/evaluate", name)
        sampling = own.for_evaluation()
        sampled = held_out if config.suites[name].prompts is None else None
        samples = sample_and_score(own, do, place, sampling, policy, prompts, base_samples, sampled)
        made = do(own.evaluate(place, samples, base_samples, base))
        found[name] = made.at("metrics.json")
    return found


def walk(config: RunConfig, do: Do) -> None:
    """Hands every step of a run to ``do``, in an order in which they could be computed."""
    external = resolve_inputs(config)
    check_checkpoints(config, external)
    check_environment(config)
    check_trackers(config.tracking)
    start = external["policy"][0] if external["policy"] else None
    iterative_geb(config, Steps(config, external), start, do)


def all_steps(config: RunConfig) -> list[Step]:
    """Every step of a run, in order."""
    steps: list[Step] = []
    walk(config, _keep_in(steps))
    return steps


def unread_steps(config: RunConfig) -> list[Step]:
    """Every step of a run, in order; its inputs are neither read nor looked for.

    An input from outside stands for itself by its place, not by its content.
    """
    external = every_input(config, unread_input)
    start = external["policy"][0] if external["policy"] else unread("", "model")
    steps: list[Step] = []
    iterative_geb(config, Steps(config, external), start, _keep_in(steps))
    return steps


def _keep_in(steps: list[Step]) -> Do:
    def keep(step: Step) -> Output:
        steps.append(step)
        return step.output

    return keep


def step_names(config: RunConfig) -> list[str]:
    """Names of a run's steps, in order; its inputs are neither read nor looked for."""
    return [each.name for each in unread_steps(config)]


def _train_prompts(
    config: RunConfig, steps: Steps, do: Do, iteration: int, base: Model, prompts: Output
) -> Output:
    """D_t, without the prompts that the starting policy solves if those are screened."""
    table = prompts.at(f"iteration-{iteration}.parquet")
    if config.screen.num_samples == 0:
        return table
    place = f"screen/iteration-{iteration}"
    sampling = steps.for_screening(iteration)
    samples = sample_and_score(steps, do, place, sampling, base, table)
    return do(steps.screen(iteration, table, samples)).at("prompts.parquet")
