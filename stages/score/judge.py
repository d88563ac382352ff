"""The ``judge`` oracle: a chat model at an OpenAI-compatible address marks each response."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import BaseModel, Field, ValidationError

from stages.contract.context import StageContext
from stages.contract.digests import sha256_file
from stages.contract.errors import UserError
from stages.score.oracle import Verdict
from stages.score.params import ScoreParams
from stages.score.remote import Remote, not_agreed

_DEFAULT_TEMPLATE = Path(__file__).with_name("judge.jinja")
_SCORE_LINE = re.compile(r"Score: (-?\d+(?:\.\d+)?)")


class _Message(BaseModel):
    # Null where a server sets the model's reasoning apart and nothing followed it.
    content: str | None


class _Choice(BaseModel):
    message: _Message


class _Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int


class Completion(BaseModel):
    """What is read of a chat completion."""

    choices: list[_Choice] = Field(min_length=1)
    usage: _Usage


@dataclass(frozen=True)
class Judge:
    """Asks for one mark per response.

    Attributes:
        remote: The server.
        template: Renders the judge's only message from ``messages``, ``response``,
            ``reference_answer``, ``lowest`` and ``highest``.
        identity: The model's name, and the digest of the template.
        params: The stage's parameters.
    """

    remote: Remote
    template: Template
    identity: str
    params: ScoreParams

    def score(self, rows: Sequence[Mapping[str, Any]]) -> list[Verdict]:
        """Scores the rows; see :class:`stages.score.oracle.Oracle`."""
        return self.remote.post_all([self._question(row) for row in rows], self._read)

    def _question(self, row: Mapping[str, Any]) -> dict[str, Any]:
        try:
            text = self.template.render(
                messages=row["messages"],
                response=row["response"],
                reference_answer=row["reference_answer"],
                lowest=f"{self.params.judge_lowest:g}",
                highest=f"{self.params.judge_highest:g}",
            )
        except TemplateError as error:
            raise UserError(
                f"the judge's template does not render: {error}",
                "it may use messages, response, reference_answer, lowest and highest",
            ) from error
        return {
            "model": self.params.judge_model,
            "messages": [{"role": "user", "content": text}],
            "temperature": 0,
            "max_tokens": self.params.judge_max_tokens,
        }

    def _read(self, body: bytes) -> Verdict:
        try:
            completion = Completion.model_validate_json(body)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            what = f"{place or 'body'}: {first['msg']}"
            raise not_agreed(self.remote.url, body, what) from error
        score, reason = self._mark(completion.choices[0].message.content or "")
        usage = completion.usage
        return Verdict(
            score,
            reason,
            {
                "judge_prompt_tokens": usage.prompt_tokens,
                "judge_completion_tokens": usage.completion_tokens,
            },
        )

    def _mark(self, text: str) -> tuple[float | None, str | None]:
        """The number on the last line, or why there is none."""
        last = text.rstrip().rpartition("\n")[2].strip()
        match = _SCORE_LINE.fullmatch(last)
        if match is None:
            return None, f"the judge's last line is {last[:80]!r}, not 'Score: <number>'"
        mark = float(match[1])
        lowest, highest = self.params.judge_lowest, self.params.judge_highest
        if not lowest <= mark <= highest:
            return None, f"the judge's mark {mark:g} is not between {lowest:g} and {highest:g}"
        return mark, None


def load(ctx: StageContext[ScoreParams]) -> Judge:
    """Prepares questions to the model that the parameters name.

    Raises:
        UserError: Address or model are missing, the key is not in the environment, or the template
            (input ``code``, if given) is none.
    """
    params = ctx.params
    if not params.remote_url or not params.judge_model:
        raise UserError(
            "the oracle judge needs score.remote_url and score.judge_model",
            "set the address of the chat completions (…/v1/chat/completions) and the model's name",
        )
    path = ctx.path("code") if ctx.has("code") else _DEFAULT_TEMPLATE
    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, trim_blocks=True)
    try:
        template = environment.from_string(path.read_text())
    except TemplateError as error:
        raise UserError(
            f"the judge's template {path} cannot be read: {error}", "mend the template"
        ) from error
    return Judge(
        remote=Remote(params.remote_url, params),
        template=template,
        identity=f"judge:{params.judge_model}@{sha256_file(path)[:16]}",
        params=params,
    )
