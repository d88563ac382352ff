"""The template of a judge's question: a Jinja file, read and checked. Flows import this."""

from pathlib import Path

from jinja2 import StrictUndefined, Template, TemplateError
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment

from stages.contract.errors import UserError

# Variables without which a judge does not see what it judges, by the mode.
_NEEDED = {"scored": {"response"}, "pairwise": {"first", "second"}}


def read_template(path: Path, mode: str) -> Template:
    """Reads a template for a mode of the judge.

    Raises:
        UserError: It cannot be read, or leaves out what the judge shall judge.
    """
    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, trim_blocks=True)
    try:
        text = path.read_text(encoding="utf-8")
        template = environment.from_string(text)
        variables = find_undeclared_variables(environment.parse(text))
    except (TemplateError, UnicodeDecodeError) as error:
        raise UserError(
            f"the judge's template {path} cannot be read: {error}", "correct the template"
        ) from error
    missing = sorted(_NEEDED[mode] - variables)
    if missing:
        raise UserError(
            f"the judge's template {path} does not show {' and '.join(missing)}, which mode "
            f"{mode} judges",
            "write {{ response }}, in mode pairwise {{ first }} and {{ second }}; or set "
            "oracle_code to null for the default template",
        )
    return template
