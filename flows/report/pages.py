"""Pages and documents of a report, rendered from the templates beside this module."""

from __future__ import annotations

from typing import Any

import jinja2


def render(template: str, **values: Any) -> str:
    """Renders a template; in pages (``.html.jinja``) every value is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("flows.report"),
        autoescape=template.endswith(".html.jinja"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template(template).render(values)
