"""Settings of a runner for one stage: its own over those of all stages."""

from __future__ import annotations

from typing import Any

from stages.contract.params import Settings


def fields_for_stage(
    kind: type[Settings], everywhere: Settings, own: Settings | None
) -> dict[str, Any]:
    """Fields of one stage's settings; mappings such as ``environment`` are merged by their keys.

    Args:
        kind: The settings that may differ from stage to stage.
        everywhere: Those of all stages.
        own: Those that the stage has of its own, if any: fields that are set count.
    """
    merged = {name: getattr(everywhere, name) for name in kind.model_fields}
    for name in own.model_fields_set if own is not None else ():
        value = getattr(own, name)
        merged[name] = merged[name] | value if isinstance(value, dict) else value
    return merged
