"""Sampling with vLLM: paged attention, continuous batching, prompts shared between samples."""

from collections.abc import Iterator, Sequence
from typing import Any

from stages.contract.events import Emitter
from stages.generate.backend import LENGTH, STOP, EncodedPrompt, SampledResponse
from stages.generate.params import GenerateParams
from stages.generate.policy import Policy
from stages.generate.vllm_engine import MEMORY_REMEDY, require_vllm, start_engine
from stages.modeling.engine_errors import engine_error


class VllmBackend:
    """Samples from a vLLM engine that this process starts."""

    def __init__(self, policy: Policy, params: GenerateParams, events: Emitter):
        self._params = params
        self._events = events
        self._stop_ids = sorted(policy.stop_ids)
        require_vllm()
        events.info("starting vLLM's engine")
        self._engine = start_engine(policy, params)

    def generate(
        self, prompts: Sequence[EncodedPrompt], held: frozenset[tuple[int, int]] = frozenset()
    ) -> Iterator[tuple[int, int, SampledResponse]]:
        """Continues every prompt once per seed; see :class:`stages.generate.backend.Backend`."""
        from vllm.inputs.engine import tokens_input

        for number, prompt in enumerate(prompts):
            for sample, seed in enumerate(prompt.seeds):
                if (number, sample) in held:
                    continue
                self._engine.add_request(
                    f"{number}/{sample}",
                    tokens_input(prompt.token_ids),
                    self._sampling_params(seed),
                )
        while self._engine.has_unfinished_requests():
            try:
                outputs = self._engine.step()
            except Exception as error:
                raise engine_error("vLLM", error, MEMORY_REMEDY) from error
            self._events.note(f"{self._engine.get_num_unfinished_requests()} responses in work")
            for output in outputs:
                if output.finished:
                    number, sample = map(int, output.request_id.split("/"))
                    yield number, sample, _to_sample(output.outputs[0])

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

    def close(self) -> None:
        """Ends the engine and its processes."""
        self._engine.engine_core.shutdown()


load = VllmBackend


def _to_sample(completion: Any) -> SampledResponse:
    token_ids = list(completion.token_ids)
    logprobs = [
        position[token].logprob
        for token, position in zip(token_ids, completion.logprobs, strict=True)
    ]
    if completion.finish_reason not in (STOP, LENGTH):
        raise RuntimeError(f"vLLM ended a response with {completion.finish_reason!r}")
    return SampledResponse(token_ids, logprobs, completion.finish_reason)
