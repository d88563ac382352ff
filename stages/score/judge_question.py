"""Questions to a chat model at an OpenAI-compatible address, and its answers."""

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from jinja2 import Template, TemplateError
from pydantic import BaseModel, Field

from stages.contract.errors import UserError
from stages.score.remote import Remote

REPEAT_AGREEMENT = "repeat_agreement"
"""Component: share of questions whose answer was the same each time."""


class _Message(BaseModel):
    # Null if a server sets the model's reasoning apart and nothing followed it.
    content: str | None


class TokenLogprob(BaseModel):
    """A token that the model may have begun with, and its log-probability."""

    token: str
    logprob: float


class _Position(BaseModel):
    top_logprobs: list[TokenLogprob]


class _Logprobs(BaseModel):
    content: list[_Position] | None = None


class _Choice(BaseModel):
    message: _Message
    logprobs: _Logprobs | None = None


class _Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int


class Reply(BaseModel):
    """The part of a chat completion that is read."""

    choices: list[_Choice] = Field(min_length=1)
    usage: _Usage

    @property
    def last_line(self) -> str:
        """The last line that is not empty, without space around it."""
        text = self.choices[0].message.content or ""
        return text.rstrip().rpartition("\n")[2].strip()

    @property
    def first_tokens(self) -> list[TokenLogprob]:
        """The likeliest first tokens; none if the server was not asked, or does not tell."""
        told = self.choices[0].logprobs
        return told.content[0].top_logprobs if told and told.content else []


def token_components(replies: Iterable[Reply]) -> dict[str, float]:
    """The replies' token counts, as components of a score."""
    used = [each.usage for each in replies]
    return {
        "judge_prompt_tokens": float(sum(each.prompt_tokens for each in used)),
        "judge_completion_tokens": float(sum(each.completion_tokens for each in used)),
    }


@dataclass(frozen=True)
class Question:
    """One kind of question to a model of a server, asked at temperature 0."""

    remote: Remote
    template: Template
    """Renders the message; if it sets ``system``, that is a system message before it."""
    model: str
    max_tokens: int
    options: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the request besides."""

    def ask(
        self, groups: Sequence[Sequence[Mapping[str, Any]]]
    ) -> Generator[tuple[int, list[Reply]], None, None]:
        """Asks once for each set of the template's variables.

        Yields:
            (number of the group, its replies) once all of a group's questions are answered.
        """
        yield from ((number, []) for number, group in enumerate(groups) if not group)
        asked = [
            (number, place) for number, group in enumerate(groups) for place in range(len(group))
        ]
        known: list[dict[int, Reply]] = [{} for _ in groups]
        payloads = (self._payload(groups[number][place]) for number, place in asked)
        with closing(self.remote.post_each(payloads, Reply)) as replies:
            for request, reply in replies:
                number, place = asked[request]
                known[number][place] = reply
                if len(known[number]) == len(groups[number]):
                    yield number, [known[number][each] for each in sorted(known[number])]

    def _payload(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        try:
            rendered = self.template.make_module(dict(variables))
        except TemplateError as error:
            raise UserError(
                f"the judge's template does not render: {error}",
                f"it may use {', '.join(variables)}",
            ) from error
        messages = [{"role": "user", "content": str(rendered)}]
        if hasattr(rendered, "system"):
            messages.insert(0, {"role": "system", "content": rendered.system})
        return {
            "model": self.model,
            "messages": messages,
            "temperature": 0,
            "max_tokens": self.max_tokens,
            **self.options,
        }
