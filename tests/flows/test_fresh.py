"""Runs of a schedule: the same run each time, or a fresh one."""

import datetime

from flows.pipeline.config import RunConfig
from flows.pipeline.presets import fresh_run

SATURDAY = datetime.datetime(2026, 11, 21, 2, 0, 0, tzinfo=datetime.UTC)
IN_TOKYO = SATURDAY.astimezone(datetime.timezone(datetime.timedelta(hours=9)))
SUNDAY = SATURDAY + datetime.timedelta(days=1)


def test_each_start_has_a_dated_name_and_a_seed_and_one_model():
    first = fresh_run(RunConfig(name="nightly", seed=3), SATURDAY)
    second = fresh_run(RunConfig(name="nightly", seed=3), SUNDAY)
    assert (first.name, first.seed) == ("nightly-20261121-020000", 20261121020003)
    assert (second.name, second.seed) == ("nightly-20261122-020000", 20261122020003)
    assert first.model == second.model == "nightly"
    assert RunConfig.model_validate_json(first.to_json()) == first


def test_the_same_start_is_the_same_run_in_every_time_zone():
    config = RunConfig(name="nightly", model="shop")
    assert fresh_run(config, SATURDAY) == fresh_run(config, IN_TOKYO)
    assert fresh_run(config, SATURDAY).model == "shop"


def test_the_longest_name_stays_a_name():
    named = fresh_run(RunConfig(name="n" * 100), SATURDAY)
    assert len(named.name) == 100
    assert named.name.endswith("-20261121-020000")
