"""The runs of a sweep: configurations, times a grid over their fields, times seeds. Pure."""

import hashlib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flows.pipeline.config import RunConfig
from flows.pipeline.loading import with_fields
from flows.pipeline.names import require_name
from flows.pipeline.strict_yaml import parse_yaml
from stages.contract.errors import UserError

_MAX_NAME = 100
# Runs of a grid are compared, not put into production: each registers a model under its name.
_OF_EVERY_RUN = {"model": None, "promote.aliases": ()}
_SET_BY_THE_SWEEP = ("name", "seed", "store", "model")


@dataclass(frozen=True)
class SweepCell:
    """One run of a sweep."""

    method: str
    """Label of the runs that differ in the seed alone."""
    config: RunConfig


def parse_axes(axes: Iterable[str]) -> dict[str, list[Any]]:
    """Reads ``train.kappa=0.5,1`` as the values 0.5 and 1 of the field ``train.kappa``.

    Raises:
        UserError: An axis is not of that form, or says something twice.
    """
    parsed: dict[str, list[Any]] = {}
    for axis in axes:
        name, separator, text = axis.partition("=")
        name = name.strip()
        values = parse_yaml(f"[{text}]", axis)
        if not separator or not name or not values:
            raise UserError(
                f"{axis!r} is not FIELD=VALUE,VALUE", "write for example train.kappa=0.5,1"
            )
        if name in parsed or len({str(value) for value in values}) != len(values):
            raise UserError(f"{axis!r} says something twice", "name each field and value once")
        if name in _SET_BY_THE_SWEEP:
            raise UserError(
                f"{name} is set by the sweep",
                "leave it out of the grid; `geb sweep` has --name, --seeds and --store",
            )
        parsed[name] = values
    return parsed


def cells(
    name: str, configs: Sequence[RunConfig], axes: Mapping[str, Sequence[Any]], seeds: Sequence[int]
) -> list[SweepCell]:
    """Every configuration with every combination of values under every seed.

    The seeds of one method are together; without ``seeds``, a configuration's own is its only one.
    Names of runs begin with the sweep's, and name their configuration if there are several.

    Raises:
        UserError: The name, a field or a value is wrong, a seed or the name of a configuration
            comes twice, or the configurations have two stores.
    """
    require_name(name, "sweep")
    if len(set(seeds)) != len(seeds):
        raise UserError(f"seeds {list(seeds)} name one twice", "give each seed once")
    _require_one_sweep(configs)
    planned = []
    for config, *values in itertools.product(configs, *axes.values()):
        fields = dict(zip(axes, values, strict=True))
        labels = [f"{field}={value}" for field, value in fields.items()]
        prefix = name
        if len(configs) > 1:
            labels.insert(0, config.name)
            prefix = f"{name}-{config.name}"
        method = ", ".join(labels) or name
        for seed in seeds or [config.seed]:
            run = {**_OF_EVERY_RUN, **fields, "name": _run_name(prefix, fields, seed), "seed": seed}
            planned.append(SweepCell(method, with_fields(config, run, f"sweep {name}")))
    return planned


def _require_one_sweep(configs: Sequence[RunConfig]) -> None:
    if not configs:
        raise UserError("the sweep has no configuration", "name at least one")
    names = [config.name for config in configs]
    if len(set(names)) != len(names):
        raise UserError(f"of {', '.join(names)} two have one name", "rename all but one")
    stores = sorted({config.store for config in configs})
    if len(stores) > 1:
        raise UserError(
            f"the configurations name the stores {', '.join(stores)}", "name one with --store"
        )


def _run_name(prefix: str, fields: Mapping[str, Any], seed: int) -> str:
    """Name of a run; one that a file cannot have in full is cut and gets a digest."""
    values = [f"{name}_{value}" for name, value in fields.items()]
    whole = "-".join([prefix, *values, f"s{seed}"])
    plain = re.sub(r"[^A-Za-z0-9._-]+", "_", whole)
    if plain == whole and len(plain) <= _MAX_NAME:
        return plain
    digest = hashlib.sha256(whole.encode()).hexdigest()[:8]
    return f"{plain[:91]}-{digest}"
