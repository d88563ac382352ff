"""log π_ref of given responses: one forward pass of the reference over prompt and response.

Shapes: ``R`` responses, ``B`` sequences of a pass, ``T`` their padded length, ``N`` response tokens
of a pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from stages.contract.context import ModelSource
from stages.contract.errors import UserError
from stages.modeling.load import Precision, load_causal_lm
from stages.modeling.logprobs import ResponseLogprobs
from stages.modeling.probe import UnfitModelError, check_logprobs
from stages.modeling.rope import require_static_rope
from stages.modeling.token_batches import token_batches

TokenIds = Sequence[npt.NDArray[np.int32]]


class Reference:
    """The reference model, loaded once.

    Args:
        source: Folder or hub id.
        dtype: Type of its weights.
        batch_tokens: Most tokens in one pass, padding included.

    Raises:
        UserError: There is no such model, or its log-probabilities cannot be computed.
    """

    def __init__(self, source: ModelSource, dtype: Precision, batch_tokens: int) -> None:
        model = load_causal_lm(source, dtype=dtype)
        try:
            check_logprobs(model)
        except UnfitModelError as error:
            raise UserError(
                f"log-probabilities of {source.name_or_path} cannot be computed: {error}",
                "set `evaluate.log_pi_ref: off`",
            ) from error
        self._config = model.config
        self._place = source.name_or_path
        self._device = model.device
        self._logprobs = ResponseLogprobs(model)
        self._vocabulary = model.get_output_embeddings().weight.shape[0]
        self._batch_tokens = batch_tokens

    @torch.inference_mode()
    def log_probabilities(self, prompts: TokenIds, responses: TokenIds) -> npt.NDArray[np.float64]:
        """Sums log π_ref over the tokens of each response, at temperature 1.

        Args:
            prompts: Token ids of the R prompts, each at least one long.
            responses: Token ids of the R responses; an empty one has log-probability 0.

        Returns:
            [R] float64.

        Raises:
            UserError: A token is not in the reference's vocabulary, or a sequence is so long that
                it would change the log-probabilities of others.
        """
        highest = max((int(ids.max()) for ids in [*prompts, *responses] if len(ids)), default=0)
        if highest >= self._vocabulary:
            raise UserError(
                f"the samples hold token {highest}, the reference has {self._vocabulary} tokens",
                "use a reference with the policy's tokenizer",
            )
        sums = np.zeros(len(prompts), dtype=np.float64)
        lengths = [len(p) + len(r) for p, r in zip(prompts, responses, strict=True)]
        require_static_rope(
            self._config,
            self._place,
            longest=max(lengths, default=0),
            remedy="set `evaluate.log_pi_ref: off`",
        )
        for rows in token_batches(lengths, self._batch_tokens):
            sums[rows] = self._pass(
                [prompts[row] for row in rows], [responses[row] for row in rows]
            )
        return sums

    def _pass(self, prompts: TokenIds, responses: TokenIds) -> npt.NDArray[np.float64]:
        width = max(len(p) + len(r) for p, r in zip(prompts, responses, strict=True))
        ids = np.zeros((len(prompts), width), dtype=np.int64)
        positions = []
        for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            end = len(prompt) + len(response)
            ids[row, : len(prompt)] = prompt
            ids[row, len(prompt) : end] = response
            # The logits at a position predict the next one.
            positions.append(row * width + np.arange(len(prompt) - 1, end - 1))
        owners = np.repeat(np.arange(len(prompts)), [len(each) for each in responses])
        input_ids = torch.from_numpy(ids).to(self._device)
        source_index = torch.from_numpy(np.concatenate(positions)).to(self._device)
        targets = torch.from_numpy(np.concatenate(responses).astype(np.int64)).to(self._device)
        token_logprobs = self._logprobs(input_ids, source_index, targets).double().cpu().numpy()
        return np.bincount(owners, weights=token_logprobs, minlength=len(prompts)).astype(
            np.float64, copy=False
        )
