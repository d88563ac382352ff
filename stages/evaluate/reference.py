"""log π_ref of given responses: one forward pass of the reference over prompt and response.

Shapes: ``R`` responses, ``B`` sequences of a pass, ``T`` their padded length, ``N`` response tokens
of a pass.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from stages.contract.errors import UserError
from stages.contract.request import Resources
from stages.harness.context import ModelSource
from stages.modeling.load import Precision, load_causal_lm, load_config
from stages.modeling.logprobs import ResponseLogprobs
from stages.modeling.probe import UnfitModelError, check_logprobs, require_static_rope
from stages.modeling.process_pool import DevicePool
from stages.modeling.token_batches import token_batches

TokenIds = Sequence[npt.NDArray[np.int32]]
Pass = tuple[TokenIds, TokenIds]
"""Prompts and responses of one forward pass."""


class Reference:
    """The reference model, one on each device of the stage.

    Args:
        source: Folder or hub id.
        dtype: Type of its weights.
        batch_tokens: Most tokens in one pass, padding included.
        resources: Those of the stage.
        remedy: What a person does to do without these log-probabilities.

    Raises:
        UserError: There is no such model, or its log-probabilities cannot be computed.
    """

    def __init__(
        self,
        source: ModelSource,
        dtype: Precision,
        batch_tokens: int,
        resources: Resources,
        remedy: str = "set `evaluate.log_pi_ref: off`",
    ) -> None:
        self._config = load_config(source)
        self._place = source.name_or_path
        self._batch_tokens = batch_tokens
        self._remedy = remedy
        self._models: DevicePool[Pass, npt.NDArray[np.float64]] = DevicePool(
            partial(_Model, source, dtype, remedy), resources
        )

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
        sums = np.zeros(len(prompts), dtype=np.float64)
        lengths = [len(p) + len(r) for p, r in zip(prompts, responses, strict=True)]
        require_static_rope(
            self._config,
            self._place,
            longest=max(lengths, default=0),
            remedy=self._remedy,
        )
        batches = list(token_batches(lengths, self._batch_tokens))
        passes = (
            [[each[row] for row in rows] for each in (prompts, responses)] for rows in batches
        )
        found = self._models.map((each[0], each[1]) for each in passes)
        for rows, of_rows in zip(batches, found, strict=True):
            sums[rows] = of_rows
        return sums

    def close(self) -> None:
        """Ends the processes of the devices."""
        self._models.close()


class _Model:
    """The reference, loaded in one process; called with a pass, it sums each row's log π_ref."""

    def __init__(self, source: ModelSource, dtype: Precision, remedy: str) -> None:
        model = load_causal_lm(source, dtype=dtype)
        try:
            check_logprobs(model)
        except UnfitModelError as error:
            raise UserError(
                f"log-probabilities of {source.name_or_path} cannot be computed: {error}", remedy
            ) from error
        self._device = model.device
        self._logprobs = ResponseLogprobs(model)
        self._vocabulary = model.get_output_embeddings().weight.shape[0]

    @torch.inference_mode()
    def __call__(self, rows: Pass) -> npt.NDArray[np.float64]:
        prompts, responses = rows
        highest = max((int(ids.max()) for ids in [*prompts, *responses] if len(ids)), default=0)
        if highest >= self._vocabulary:
            raise UserError(
                f"the samples hold token {highest}, the reference has {self._vocabulary} tokens",
                "use a reference with the policy's tokenizer",
            )
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
