"""Sampling from an OpenAI-compatible server that has the policy loaded.

Two dialects. Servers built for it (vLLM's, SGLang's) take further fields and return token ids with
their log-probabilities, which is what training wants. Others get the fields of OpenAI's API alone
and return text: then ids are read off it, if the settings allow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from stages.contract.errors import UserError
from stages.contract.events import Emitter
from stages.generate.backend import LENGTH, STOP, Prompt, Sample, Sampling
from stages.generate.params import GenerateParams
from stages.generate.policy import Policy
from stages.modeling.chat import with_system_prompt
from stages.remote.client import Remote, first_problem, start_of

_PATHS = {"completions": "/completions", "chat": "/chat/completions"}


class _TokenLogprob(BaseModel):
    logprob: float


class _Logprobs(BaseModel):
    # Of a completion, and of a chat completion.
    token_logprobs: list[float] | None = None
    content: list[_TokenLogprob] | None = None

    def values(self) -> list[float] | None:
        if self.content is not None:
            return [each.logprob for each in self.content]
        return self.token_logprobs


class _Message(BaseModel):
    content: str | None


class _Choice(BaseModel):
    text: str | None = None
    message: _Message | None = None
    finish_reason: str | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None


class _Answer(BaseModel):
    choices: list[_Choice] = Field(min_length=1)
    prompt_token_ids: list[int] | None = None


class OpenaiBackend:
    """Samples from a server.

    Args:
        policy: The policy that the server has loaded; its tokenizer renders and reads.
        params: The server's address, model and dialect.

    Raises:
        UserError: The environment variable that shall hold the key is not set.
    """

    def __init__(self, policy: Policy, params: GenerateParams):
        server = params.openai
        assert server.url is not None
        self._policy = policy
        self._params = params
        self._remote = Remote(
            server,
            url=server.url.rstrip("/") + _PATHS[server.endpoint],
            section="generate.openai",
            check=f"check generate.openai.url, and that the server serves a model "
            f"{server.model!r} (generate.openai.model) with enough context",
        )
        self.notes: Mapping[str, Any] = {
            "batch_invariant": False,
            "server_model": server.model,
            "token_ids": "of the server"
            if self._wants_ids
            else "of the server where it gives them, else of its text by the policy's tokenizer",
        }

    @property
    def _wants_ids(self) -> bool:
        return self._params.openai.without_token_ids == "refuse"

    def generate(
        self, prompts: Iterator[Prompt], sampling: Sampling
    ) -> Iterator[tuple[int, int, Sample]]:
        """Continues every prompt once per seed; see :class:`stages.generate.backend.Backend`."""
        asked: dict[int, tuple[int, int, Prompt]] = {}

        def payloads() -> Iterator[dict[str, Any]]:
            request = 0
            for number, prompt in enumerate(prompts):
                for sample, seed in enumerate(prompt.seeds):
                    asked[request] = number, sample, prompt
                    request += 1
                    yield self._payload(prompt, seed, sampling)

        with closing(self._remote.post_each(payloads(), self._read)) as answers:
            for request, (body, answer) in answers:
                number, sample, prompt = asked.pop(request)
                yield number, sample, self._to_sample(prompt, answer, body)

    def close(self) -> None:
        """Nothing to end: the server is not ours."""

    def _payload(self, prompt: Prompt, seed: int, sampling: Sampling) -> dict[str, Any]:
        params = sampling.params
        payload: dict[str, Any] = {
            "model": params.openai.model,
            "max_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "seed": seed,
        }
        if params.openai.endpoint == "chat":
            payload["messages"] = list(with_system_prompt(prompt.messages, params.system_prompt))
            payload["logprobs"] = self._wants_ids
        else:
            payload["prompt"] = prompt.token_ids
            payload["logprobs"] = 0 if self._wants_ids else None
        if self._wants_ids:
            payload |= {
                "return_token_ids": True,
                "stop_token_ids": sorted(sampling.stop_ids),
                # Whatever the checkpoint's generation configuration says: the policy's own
                # distribution, and nothing else, is what training wants samples of.
                "top_k": 0,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
            }
            if params.openai.endpoint == "chat":
                payload["chat_template_kwargs"] = params.chat_template_args
        return payload

    def _read(self, body: bytes) -> tuple[bytes, _Answer]:
        try:
            return body, _Answer.model_validate_json(body)
        except ValidationError as error:
            raise self._unusable(first_problem(error), body) from error

    def _to_sample(self, prompt: Prompt, answer: _Answer, body: bytes) -> Sample:
        choice = answer.choices[0]
        if choice.finish_reason not in (STOP, LENGTH):
            raise self._unusable(f"it ended for the reason {choice.finish_reason!r}", body)
        read = answer.prompt_token_ids or choice.prompt_token_ids
        if read is not None and read != prompt.token_ids:
            raise UserError(
                f"{self._remote.url} reads a prompt as {len(read)} tokens that are not the "
                f"{len(prompt.token_ids)} of the policy's tokenizer and chat template",
                "serve the checkpoint that is the policy, or set generate.openai.endpoint to "
                "'completions', which sends token ids",
            )
        logprobs = choice.logprobs.values() if choice.logprobs is not None else None
        ids = choice.token_ids
        if ids is not None and logprobs is not None and len(ids) == len(logprobs):
            return Sample(ids, logprobs, choice.finish_reason)
        if self._wants_ids:
            raise UserError(
                f"{self._remote.url} returns text without token ids and their log-probabilities: "
                f"{start_of(body)}",
                "use a server that returns them (vLLM's does), or set "
                "generate.openai.without_token_ids to 'tokenize' to read ids off the text, with "
                "unknown log-probabilities",
            )
        if ids is None:
            ids = self._tokenize(choice)
        return Sample(ids, [math.nan] * len(ids), choice.finish_reason)

    def _tokenize(self, choice: _Choice) -> list[int]:
        """Token ids of a response's text, with the end token where it ended by one."""
        text = choice.text if choice.message is None else choice.message.content
        tokenizer = self._policy.tokenizer
        ids = list(tokenizer(text or "", add_special_tokens=False)["input_ids"])
        end = tokenizer.eos_token_id
        if choice.finish_reason == STOP and end is not None:
            ids.append(end)
        return ids

    def _unusable(self, what: str, body: bytes) -> UserError:
        return UserError(
            f"the answer of {self._remote.url} is no response to train on: {what}; it begins "
            f"{start_of(body)}",
            "check that the server speaks OpenAI's API at this address",
        )


def load(policy: Policy, params: GenerateParams, events: Emitter) -> OpenaiBackend:
    """Connects to the server that the parameters name; see :class:`OpenaiBackend`."""
    return OpenaiBackend(policy, params)
