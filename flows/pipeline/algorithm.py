"""Algorithm 1 of the paper, over steps."""

from __future__ import annotations

from collections.abc import Callable

from flows.pipeline.config import RunConfig
from flows.pipeline.inputs import resolve_inputs
from flows.pipeline.preflight import check_checkpoints
from flows.pipeline.steps import Output, Samples, Source, Step, Steps

Do = Callable[[Step], Output]


def iterative_geb(config: RunConfig, steps: Steps, start: Source | None, do: Do) -> None:
    """Runs T iterations of generate → score → pair → train → evaluate → promote.

    Args:
        config: The run's configuration.
        steps: What to ask of each stage.
        start: The policy to start from; None makes one by supervised warm start.
        do: Takes a step in hand and returns its output at once; whoever executes it sees to the
            order that the inputs demand.
    """
    prompts = do(steps.prepare())
    base = do(steps.warm_start()).at("checkpoint") if config.inputs.warm_start else start
    assert base is not None
    base_samples = _evaluation_samples(config, steps, do, "base", 0, base, prompts)
    train_prompts = {
        iteration: _train_prompts(config, steps, do, iteration, base, prompts)
        for iteration in range(1, config.iterations + 1)
    }
    policy = reference = base
    history: list[Output] = []
    previous_metrics: Output | None = None
    for iteration in range(1, config.iterations + 1):
        place = f"iteration-{iteration}"
        samples = Samples()
        for shard in range(config.generate.num_shards):
            responses = do(steps.generate(iteration, shard, policy, train_prompts[iteration]))
            samples.responses.append(responses.at("responses.parquet"))
            scores = do(steps.score(place, iteration, shard, samples.responses[-1]))
            samples.scores.append(scores.at("scores.parquet"))
        history.append(do(steps.pair(iteration, samples)).at("pairs.parquet"))
        pairs = history if config.pair_data == "accumulate" else history[-1:]
        trained = do(steps.train(iteration, policy, reference, pairs))
        policy = trained.at("checkpoint")
        reference = {
            "previous": policy,
            "initial": base,
            "ema": trained.at("ema"),
        }[config.train.reference]
        own = _evaluation_samples(
            config, steps, do, f"{place}/evaluate", iteration, policy, prompts, base_samples
        )
        evaluated = do(steps.evaluate(f"{place}/evaluate", iteration, own, base_samples, base))
        metrics = evaluated.at("metrics.json")
        do(steps.promote(iteration, policy, metrics, previous_metrics))
        previous_metrics = metrics


def walk(config: RunConfig, do: Callable[[Step], Output]) -> None:
    """Hands every step of a run to ``do``, in an order in which they could be computed."""
    external = resolve_inputs(config)
    check_checkpoints(config, external)
    start = external["policy"][0] if external["policy"] else None
    iterative_geb(config, Steps(config, external), start, do)


def all_steps(config: RunConfig) -> list[Step]:
    """Every step of a run, in order."""
    steps: list[Step] = []

    def keep(step: Step) -> Output:
        steps.append(step)
        return Output(step.name)

    walk(config, keep)
    return steps


def _evaluation_samples(
    config: RunConfig,
    steps: Steps,
    do: Do,
    place: str,
    iteration: int,
    policy: Source,
    prompts: Output,
    base: Samples | None = None,
) -> Samples:
    """Samples and scores on the held-out prompts; the base's are shared by all iterations.

    A judge that compares sets them against the base's, sample by sample, so that ½ means as good as
    the base; other oracles need no opponents.
    """
    samples = Samples()
    for shard in range(config.evaluation.num_shards):
        made = do(steps.generate_test(place, iteration, shard, policy, prompts))
        samples.responses.append(made.at("responses.parquet"))
        opponents = (base or samples).responses[shard] if config.score.compares else None
        scores = do(steps.score(place, iteration, shard, samples.responses[-1], opponents))
        samples.scores.append(scores.at("scores.parquet"))
    return samples


def _train_prompts(
    config: RunConfig, steps: Steps, do: Do, iteration: int, base: Source, prompts: Output
) -> Output:
    """D_t, without the prompts that the starting policy solves where those are screened."""
    table = prompts.at(f"iteration-{iteration}.parquet")
    if config.screen.num_samples == 0:
        return table
    place = f"screen/iteration-{iteration}"
    samples = Samples()
    for shard in range(config.generate.num_shards):
        made = do(steps.generate_screen(place, iteration, shard, base, table))
        samples.responses.append(made.at("responses.parquet"))
        scores = do(steps.score(place, iteration, shard, samples.responses[-1]))
        samples.scores.append(scores.at("scores.parquet"))
    return do(steps.screen(iteration, table, samples)).at("prompts.parquet")
