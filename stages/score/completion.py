"""Questions to a chat model at an OpenAI-compatible address."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from jinja2 import Template, TemplateError
from pydantic import BaseModel, Field, ValidationError

from stages.contract.errors import UserError
from stages.remote.client import Remote
from stages.score.agreement import not_agreed
from stages.score.costs import COMPLETION_TOKENS, PROMPT_TOKENS


class _Message(BaseModel):
    # Null where a server sets the model's reasoning apart and nothing followed it.
    content: str | None


class _Choice(BaseModel):
    message: _Message


class _Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int


class _Completion(BaseModel):
    """The part of a chat completion that is read."""

    choices: list[_Choice] = Field(min_length=1)
    usage: _Usage


@dataclass(frozen=True)
class Tokens:
    """Token counts of some questions, shared among the responses that they were about."""

    read: float = 0.0
    written: float = 0.0

    def plus(self, other: Tokens, share: float = 1.0) -> Tokens:
        """Sum of these counts and a share of others."""
        return Tokens(self.read + share * other.read, self.written + share * other.written)

    def components(self) -> dict[str, float]:
        """The counts as components of a score."""
        return {PROMPT_TOKENS: self.read, COMPLETION_TOKENS: self.written}


@dataclass(frozen=True)
class Reply:
    """A chat model's answer.

    Attributes:
        last_line: Its last line that is not empty, without space around it.
        tokens: Tokens that it read and wrote.
    """

    last_line: str
    tokens: Tokens


@dataclass(frozen=True)
class Question:
    """One kind of question, asked at temperature 0.

    Attributes:
        remote: The server.
        template: Renders the only message.
        model: The model's name at the server.
        max_tokens: Longest answer.
    """

    remote: Remote
    template: Template
    model: str
    max_tokens: int

    def ask(
        self, variables: Iterable[Mapping[str, Any]]
    ) -> Generator[tuple[int, Reply], None, None]:
        """Asks once for each set of the template's variables; yields (its number, reply).

        Raises:
            RemoteError: The server cannot be reached, or fails again and again.
            UserError: The server refuses, its answer is no chat completion, or the template does
                not render.
        """
        payloads = (self._payload(each) for each in variables)
        with closing(self.remote.post_each(payloads, self._read)) as replies:
            yield from replies

    def _payload(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        try:
            text = self.template.render(variables)
        except TemplateError as error:
            raise UserError(
                f"the judge's template does not render: {error}",
                f"it may use {', '.join(variables)}",
            ) from error
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "temperature": 0,
            "max_tokens": self.max_tokens,
        }

    def _read(self, body: bytes) -> Reply:
        try:
            completion = _Completion.model_validate_json(body)
        except ValidationError as error:
            raise not_agreed(self.remote.url, body, error) from error
        text = completion.choices[0].message.content or ""
        return Reply(
            last_line=text.rstrip().rpartition("\n")[2].strip(),
            tokens=Tokens(completion.usage.prompt_tokens, completion.usage.completion_tokens),
        )
