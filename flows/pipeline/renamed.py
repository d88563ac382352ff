"""Old names of settings: configurations that use them load, with a warning that names the new."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from stages.contract.errors import UserError

RENAMED: Mapping[str, tuple[str, ...]] = {
    "generate.batch_size": ("generate.transformers.batch_size",),
    "score.function": ("score.python.function",),
    "score.grading_timeout_seconds": ("score.math_verify.timeout_seconds",),
    "score.engine": ("score.reward_model.engine",),
    "score.dtype": ("score.reward_model.dtype", "score.urm.dtype"),
    "score.max_length_tokens": (
        "score.reward_model.max_length_tokens",
        "score.urm.max_length_tokens",
    ),
    "score.tokens_per_batch": (
        "score.reward_model.tokens_per_batch",
        "score.urm.tokens_per_batch",
    ),
    "score.gpu_memory_utilization": ("score.reward_model.gpu_memory_utilization",),
    "score.kv_cache_gib": ("score.reward_model.kv_cache_gib",),
    "score.concurrency": (
        "score.math_verify.processes",
        "score.http.concurrency",
        "score.judge.concurrency",
    ),
    "score.judge_model": ("score.judge.model",),
    "score.judge_mode": ("score.judge.mode",),
    "score.judge_opponents": ("score.judge.opponents",),
    "score.judge_lowest": ("score.judge.lowest",),
    "score.judge_highest": ("score.judge.highest",),
    "score.judge_max_tokens": ("score.judge.max_tokens",),
    "score.judge_prompt_price": ("score.judge.prompt_price",),
    "score.judge_completion_price": ("score.judge.completion_price",),
    "score.remote_identity": ("score.http.identity",),
    "score.remote_url": ("score.http.url", "score.judge.url"),
    "score.remote_key_env": ("score.http.key_env", "score.judge.key_env"),
    "score.remote_timeout_seconds": ("score.http.timeout_seconds", "score.judge.timeout_seconds"),
    "score.remote_attempts": ("score.http.attempts", "score.judge.attempts"),
    "score.remote_wait_seconds": ("score.http.wait_seconds", "score.judge.wait_seconds"),
    "score.rows_per_request": ("score.http.rows_per_request",),
}
"""Full name of an old setting to those that it is now: several where oracles shared it, of which
only the one of the chosen oracle is read."""


class RenamedSettingWarning(FutureWarning):
    """A configuration uses the old name of a setting."""


def current_names(name: str, place: str) -> tuple[str, ...]:
    """The names that a setting has now; its own where it was not renamed."""
    if name not in RENAMED:
        return (name,)
    _warn([name], place)
    return RENAMED[name]


def move_renamed(
    values: dict[str, Any], place: str, defaults: Mapping[str, Any] | None = None
) -> None:
    """Moves settings with old names to their new places, in nested ``values``.

    Args:
        values: Sections and fields as in a configuration file.
        place: Says in messages where the values come from.
        defaults: The default configuration, nested alike: a value that is the default is moved
            without a warning, as a stored configuration has all of them and nobody wrote them.

    Raises:
        UserError: A setting is there under its old name and under its new one.
    """
    told = []
    for old, places in RENAMED.items():
        holder, last = _section(values, old)
        if last not in holder:
            continue
        value = holder.pop(last)
        for new in places:
            section, field = _section(values, new, make=True)
            if field in section:
                raise UserError(
                    f"{place} sets both {new} and {old}, its old name", f"leave out {old}"
                )
            section[field] = value
        known, field = _section(defaults or {}, places[0])
        if field not in known or known[field] != value:
            told.append(old)
    if told:
        _warn(told, place)


def _section(values: Any, name: str, *, make: bool = False) -> tuple[dict[str, Any], str]:
    """The section of a setting and its name there; an empty one where there is none to find."""
    *sections, last = name.split(".")
    for section in sections:
        if make:
            values.setdefault(section, {})
        values = values.get(section)
        # Validation says what is wrong with it.
        if not isinstance(values, dict):
            return {}, last
    return values, last


def _warn(names: Iterable[str], place: str) -> None:
    told = "; ".join(f"{name} is now {' and '.join(RENAMED[name])}" for name in names)
    warnings.warn(f"{place}: {told}", RenamedSettingWarning, stacklevel=3)
