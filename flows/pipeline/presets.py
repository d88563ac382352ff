"""The shipped configurations by name, and the dated runs that schedules start from them."""

import datetime
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flows.pipeline.config import RunConfig
from flows.pipeline.form import LONG_NAMES, SETTINGS
from flows.pipeline.loading import Sections, load_overridden, merged
from stages.contract.errors import UserError
from stages.store.opening import location_of

DEFAULT_PRESET = "quickstart"
# Instead of a preset's name if the fields given are a whole configuration.
NO_PRESET = ""
# Another folder of configurations takes the shipped one's place, for example in an image.
_FOLDER_VARIABLE = "GEB_CONFIGS"
# The store of runs whose parameters name none.
STORE_VARIABLE = "GEB_STORE"
DEFAULT_STORE = "store"
_SHIPPED = Path(__file__).parents[2] / "configs"
# Files here are presets; the files that they extend lie in other folders.
_SUBFOLDERS = ("", "chat", "paper")


def preset_names() -> list[str]:
    """Names of all presets, the quickstart first."""
    return sorted(_presets(), key=lambda name: (name != DEFAULT_PRESET, name))


def configured(preset: str, overrides: Sections) -> RunConfig:
    """The configuration of a preset with ``overrides`` laid over it.

    Without a preset, fields that ``overrides`` leaves out have their defaults. If the
    overrides name no store, ``GEB_STORE`` does. Overrides are sections and fields, and under
    `settings` lines as in ``--set``.

    Raises:
        UserError: The preset is unknown, or a value is wrong; the message names all of them.
    """
    sections, lines = _fields_and_lines(overrides)
    store = os.environ.get(STORE_VARIABLE)
    given = ({"store": store} if store else {}) | sections
    if preset == NO_PRESET:
        return load_overridden(None, given, lines, "the configuration")
    presets = _presets()
    if preset not in presets:
        raise UserError(f"no preset is named {preset!r}", f"one of: {', '.join(preset_names())}")
    return load_overridden(presets[preset], given, lines, f"preset {preset} with the fields given")


def _fields_and_lines(overrides: Sections) -> tuple[dict[str, Any], Sequence[str]]:
    """Overrides of a form as sections of a configuration, and its lines, which come after them."""
    sections = dict(overrides)
    lines = sections.pop(SETTINGS, None) or ()
    for name in LONG_NAMES.keys() & sections.keys():
        section, _, field = LONG_NAMES[name].partition(".")
        value = sections.pop(name)
        sections = merged(sections, {section: {field: value}})
    return sections, lines


def chosen_store(named: str) -> str:
    """The store of that name, else ``GEB_STORE``'s, else ``store`` here."""
    return location_of(named or os.environ.get(STORE_VARIABLE) or DEFAULT_STORE)


def configs_folder() -> Path:
    """The folder of the shipped configurations, or what ``GEB_CONFIGS`` names instead."""
    return Path(os.environ.get(_FOLDER_VARIABLE) or _SHIPPED)


def _presets() -> dict[str, Path]:
    folder = configs_folder()
    presets = {}
    for subfolder in _SUBFOLDERS:
        for path in sorted((folder / subfolder).glob("*.yaml")):
            presets[path.stem] = path
    if not presets:
        raise UserError(
            f"{folder} holds no configuration of a run",
            f"set {_FOLDER_VARIABLE} to a folder of them",
        )
    return presets


def fresh_run(config: RunConfig, start: datetime.datetime) -> RunConfig:
    """The configuration of one run of a schedule.

    Its name gets the start, its seed is the configuration's plus the start as a number. The model
    in the registry keeps its name, so that each run adds a version. A retry does not change
    ``start``, for which the run was scheduled.
    """
    stamp = start.astimezone(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    changed = {
        # At most 100 characters.
        "name": f"{config.name[:84]}-{stamp}",
        "seed": config.seed + int(stamp.replace("-", "")),
        "model": config.model or config.name,
    }
    return config.model_copy(update=changed)
