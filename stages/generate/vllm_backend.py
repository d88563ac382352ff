"""Sampling with vLLM: paged attention, continuous batching, prompts shared between samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stages.contract.events import Emitter
from stages.generate.backend import LENGTH, STOP, Prompt, Sample, engine_error
from stages.generate.params import GenerateParams
from stages.generate.policy import Policy
from stages.generate.vllm_engine import batch_invariance, memory_remedy, start_engine

# Requests that wait in the engine's queue, as a share of those in work: none of its places is ever
# empty, and memory does not grow with the number of prompts.
_QUEUE_SHARE = 1


class VllmBackend:
    """Samples from a vLLM engine that this process starts.

    Args:
        policy: The policy; its stop ids end a response.
        params: Sampling parameters and engine settings.
        events: Is told where the engine cannot do what the settings ask for.
    """

    def __init__(self, policy: Policy, params: GenerateParams, events: Emitter):
        self._params = params
        self._stop_ids = sorted(policy.stop_ids)
        self._engine = start_engine(policy, params)
        self._adapter = _adapter_request(policy)
        invariant, reason = batch_invariance(params.vllm)
        if reason is not None:
            events.warning(f"batch_invariant is off: {reason}")
        self.notes: Mapping[str, Any] = {"batch_invariant": invariant}

    def generate(self, prompts: Iterator[Prompt]) -> Iterator[tuple[int, int, Sample]]:
        """Continues every prompt once per seed; see :class:`stages.generate.backend.Backend`."""
        waiting = enumerate(prompts)
        while True:
            self._refill(waiting)
            if not self._engine.has_unfinished_requests():
                return
            for output in self._step():
                if output.finished:
                    number, sample = map(int, output.request_id.split("/"))
                    yield number, sample, _to_sample(output.outputs[0])

    def _refill(self, waiting: Iterator[tuple[int, Prompt]]) -> None:
        """Hands requests over until as many wait in the engine as it works at."""
        from vllm.inputs.engine import tokens_input

        wanted = (1 + _QUEUE_SHARE) * self._params.vllm.max_num_seqs
        while self._engine.get_num_unfinished_requests() < wanted:
            number, prompt = next(waiting, (None, None))
            if prompt is None:
                return
            for sample, seed in enumerate(prompt.seeds):
                self._engine.add_request(
                    f"{number}/{sample}",
                    tokens_input(prompt.token_ids),
                    self._sampling_params(seed),
                    lora_request=self._adapter,
                )

    def close(self) -> None:
        """Ends the engine and whatever processes it has for its GPUs."""
        self._engine.engine_core.shutdown()

    def _step(self) -> list[Any]:
        try:
            return self._engine.step()
        except Exception as error:
            raise engine_error("vLLM", error, memory_remedy(self._params.vllm)) from error

    def _sampling_params(self, seed: int) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            temperature=self._params.temperature,
            top_p=self._params.top_p,
            max_tokens=self._params.max_new_tokens,
            stop_token_ids=self._stop_ids,
            seed=seed,
            logprobs=0,
            detokenize=False,
        )


def _adapter_request(policy: Policy) -> Any:
    if policy.adapter is None:
        return None
    from vllm.lora.request import LoRARequest

    return LoRARequest("adapter", 1, str(policy.adapter))


def _to_sample(completion: Any) -> Sample:
    token_ids = list(completion.token_ids)
    logprobs = [
        position[token].logprob
        for token, position in zip(token_ids, completion.logprobs, strict=True)
    ]
    if completion.finish_reason not in (STOP, LENGTH):
        raise RuntimeError(f"vLLM ended a response with {completion.finish_reason!r}")
    return Sample(token_ids, logprobs, completion.finish_reason)
