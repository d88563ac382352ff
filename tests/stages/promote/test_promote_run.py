import json
import random
import shutil
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from stages.contract.errors import UserError
from stages.promote.params import PromoteParams
from stages.promote.run import STAGE
from stages.store.registry import ModelRegistry
from tests.stage_calls import EventLog, call, checkpoint_artifact

METRICS = {"win_rate": 0.6, "mean_reward": 1.5, "truncated_share": 0.1}


def promote(store, trained, figures=METRICS, *, events=None, run="nightly", iteration=1, **params):
    """Promotes a checkpoint whose metrics are METRICS and these figures."""
    metrics = store.root.parent / f"{uuid.uuid4().hex}.json"
    metrics.write_text(json.dumps(METRICS | figures))
    settings = {"model_name": "tiny", "better_than_base_confidence": None, "iteration": iteration}
    return call(
        STAGE,
        PromoteParams.model_validate(settings | params),
        {"checkpoint": [trained.ref("checkpoint")], "metrics": [metrics]},
        store,
        events=events,
        run=run,
        step=f"iteration-{iteration}/promote",
    )


def test_a_checkpoint_that_passes_becomes_production(store):
    trained = checkpoint_artifact(store, "one")
    events = EventLog()
    artifact = promote(store, trained, min_win_rate=0.6, events=events)
    registry = ModelRegistry(store)
    assert registry.aliases("tiny")["production"][-1].reason == (
        "passed all gates (nightly, iteration-1/promote)"
    )
    messages = [event.message for event in events.events if event.type == "log"]
    assert "tiny@production is version 1 now" in messages
    version, registered = registry.resolve("tiny@production")
    assert registered.file(version.checkpoint.path) == trained.path / "checkpoint"
    assert (version.version, version.run, version.step) == (1, "nightly", "iteration-1/promote")
    assert version.metrics == METRICS
    decided = decision(artifact)
    assert (decided["model"], decided["aliases"]) == ("tiny", ["production"])
    [gate] = decided["gates"]
    assert (gate["gate"], gate["passed"]) == ("min_win_rate", True)
    assert gate["value"] == gate["limit"] == 0.6


def decision(artifact):
    return artifact.read_json("decision.json")


def test_a_checkpoint_that_fails_is_registered_and_the_alias_stays(store):
    promote(store, checkpoint_artifact(store, "one"))
    events = EventLog()
    worse = checkpoint_artifact(store, "two")
    artifact = promote(store, worse, {"win_rate": 0.2}, events=events, min_win_rate=0.5)
    registry = ModelRegistry(store)
    assert registry.find("tiny@production").version == 1
    assert registry.find("tiny@latest").version == 2
    assert decision(artifact)["aliases"] == []
    warnings = [e.message for e in events.events if e.type == "log" and e.level == "warning"]
    assert warnings == [
        "tiny:2 is not promoted: min_win_rate: win_rate is 0.2; the gate wants at least 0.5"
    ]


def test_an_older_iteration_does_not_take_the_alias_from_a_newer_one(store):
    promote(store, checkpoint_artifact(store, "two"), iteration=10)
    events = EventLog()
    older = checkpoint_artifact(store, "one")
    stayed = promote(store, older, events=events, iteration=9)
    assert ModelRegistry(store).find("tiny@production").version == 1
    assert decision(stayed)["aliases"] == []
    assert "tiny@production stays version 1: iteration-10/promote of the same run" in "".join(
        event.message for event in events.events if event.type == "log"
    )
    other_run = checkpoint_artifact(store, "three")
    promote(store, other_run, run="weekly")
    assert ModelRegistry(store).find("tiny@production").version == 3


def test_figures_of_another_oracle_are_not_compared(store):
    first = checkpoint_artifact(store, "one")
    promote(store, first, {"mean_reward": 0.9}, measured_by="an oracle")
    better = checkpoint_artifact(store, "two")
    inflated = {"mean_reward": 70.0}
    refused = promote(store, better, inflated, run="weekly", measured_by="another")
    registry = ModelRegistry(store)
    assert registry.find("tiny@production").version == 1
    [gate] = decision(refused)["gates"]
    assert "tiny:1 has no mean_reward by this oracle" in gate["reason"]
    assert "`geb evaluate CONFIG tiny:2 --base tiny:1`" in gate["reason"]
    assert "`geb promote tiny:2`" in gate["reason"]
    # The other oracle measures what the alias holds: now the two can be compared.
    again = promote(store, first, {"mean_reward": 60.0}, run="weekly", measured_by="another")
    assert registry.find("tiny@production").version == 1
    assert decision(again)["aliases"] == ["production"], "it held this checkpoint before"
    versions = registry.versions("tiny")
    assert [version.metrics["mean_reward"] for version in versions] == [60.0, 70.0]
    assert versions[0].figures["an oracle"]["mean_reward"] == 0.9
    third = checkpoint_artifact(store, "three")
    compared = promote(store, third, inflated, run="weekly", measured_by="another")
    assert decision(compared)["gates"][0]["limit"] == 60.0
    assert registry.find("tiny@production").version == 3


def test_a_rollback_outlasts_an_evaluation_by_other_settings(store):
    checkpoints = [checkpoint_artifact(store, name) for name in ("one", "two")]
    for measured_by in ("an oracle", "another"):
        for reward, trained in enumerate(checkpoints):
            figures = {"mean_reward": reward}
            promote(store, trained, figures, run=trained.path.name, measured_by=measured_by)
        ModelRegistry(store).set_alias("tiny", "production", 1)
    assert len(ModelRegistry(store).versions("tiny")) == 2
    history = ModelRegistry(store).aliases("tiny")["production"]
    assert [move.version for move in history] == [1, 2, 1]


def test_the_gate_compares_with_the_alias_not_the_last_version(store):
    for number, (reward, holder) in enumerate([(0.9, 1), (0.6, 1), (0.65, 1), (0.95, 4)], 1):
        trained = checkpoint_artifact(store, f"number {number}")
        promoted = promote(store, trained, {"mean_reward": reward}, run=f"night-{number}")
        assert ModelRegistry(store).find("tiny@production").version == holder, reward
        limits = [gate["limit"] for gate in decision(promoted)["gates"]]
        assert limits == ([] if number == 1 else [0.9])
    # Rolled back: what the alias holds now is older than the best.
    ModelRegistry(store).set_alias("tiny", "production", 1)
    fifth = checkpoint_artifact(store, "number 5")
    promote(store, fifth, {"mean_reward": 0.92}, run="night-5")
    assert ModelRegistry(store).find("tiny@production").version == 5


def test_running_again_after_a_crash_changes_nothing(store):
    trained = checkpoint_artifact(store, "one")
    first = promote(store, trained)
    before = ModelRegistry(store).aliases("tiny")["production"]
    # The registry was written, the artifact was not published.
    shutil.rmtree(first.path)
    again = promote(store, trained)
    registry = ModelRegistry(store)
    assert registry.aliases("tiny")["production"] == before
    assert [version.version for version in registry.versions("tiny")] == [1]
    assert again.manifest.digest() == first.manifest.digest()


@pytest.mark.parametrize("change", ["newer promotion", "rollback"])
def test_a_promotion_computed_again_moves_no_alias(store, change):
    first, trained, better = (checkpoint_artifact(store, name) for name in "abc")
    promote(store, first, {"mean_reward": 1.0}, run="zeroth")
    artifact = promote(store, trained, {"mean_reward": 2.0})
    registry = ModelRegistry(store)
    if change == "rollback":
        registry.set_alias("tiny", "production", 1)
    else:
        promote(store, better, {"mean_reward": 3.0}, run="weekly")
    before = registry.aliases("tiny")["production"]
    # A damaged artifact is set aside, and its step runs again.
    shutil.rmtree(artifact.path)
    events = EventLog()
    again = promote(store, trained, {"mean_reward": 2.0}, events=events)
    assert registry.aliases("tiny")["production"] == before
    assert again.manifest.digest() == artifact.manifest.digest()
    messages = [event.message for event in events.events if event.type == "log"]
    assert any(f"stays version {before[-1].version}" in message for message in messages)


def test_concurrent_and_repeated_promotions_keep_the_newest(store):
    rewards = {f"model {number}": number / 10 for number in (3, 1, 4, 1, 5, 9, 2, 6)}
    trained = {name: checkpoint_artifact(store, name) for name in rewards}

    def write(writer):
        names = list(rewards)
        random.Random(writer).shuffle(names)
        for repetition in (1, 2):
            for name in names:
                # The tolerance gives each repetition an artifact, and is below any difference.
                promote(
                    store,
                    trained[name],
                    {"mean_reward": rewards[name]},
                    run=f"writer-{writer}",
                    max_regression=1e-9 * (2 * writer + repetition),
                )

    with ThreadPoolExecutor(3) as writers:
        list(writers.map(write, range(3)))
    registry = ModelRegistry(store)
    moves = registry.aliases("tiny")["production"]
    reached = [registry.version("tiny", move.version).metrics["mean_reward"] for move in moves]
    assert reached == sorted(reached)
    assert reached[-1] == 0.9


def test_bad_inputs_are_refused(store, tmp_path):
    trained = checkpoint_artifact(store, "one")
    broken, listed = tmp_path / "broken.json", tmp_path / "list.json"
    broken.write_text("{")
    listed.write_text("[]")
    params = PromoteParams(model_name="tiny", better_than_base_confidence=None)
    cases = [
        ([broken], "is damaged"),
        ([listed], "is damaged"),
        ([], "no local input 'metrics'"),
    ]
    for metrics, message in cases:
        inputs = {"checkpoint": [trained.ref("checkpoint")], "metrics": metrics}
        with pytest.raises(UserError, match=message):
            call(STAGE, params, inputs, store)
    assert ModelRegistry(store).names() == []
