"""Training on preference pairs, from tables to the next policy."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from stages.contract.errors import UserError
from stages.harness.context import StageContext
from stages.modeling.logprobs import ResponseLogprobs
from stages.modeling.tokenizers import load_tokenizer, require_same_tokenizer
from stages.objectives.kappa import KappaController
from stages.tables.schemas import write_table
from stages.train import reference
from stages.train.data import load_pairs
from stages.train.objective import PairObjective
from stages.train.own_objective import UserObjective
from stages.train.params import TrainParams
from stages.training.engine import Engine, Process
from stages.training.fit import Fit
from stages.training.metrics import TIMINGS, StepLog
from stages.training.policy import compile_layers, leave_layers_eager, load_logprob_model

LARGE_GAP = 0.1
"""Nats a token between log π_ref and the sampler's, in the mean, above which the result is in
doubt. Bfloat16 explains 0.04 on SmolLM2-135M."""
GREATEST_GAP = 1.0
"""Nats a token above which the two are of other weights or other tokens."""
_COUNTED = (
    "step",
    "epoch",
    "num_pairs",
    "num_tokens",
    "num_tokens_shared",
    "num_response_tokens",
)


class PairFit(Fit[TrainParams]):
    """Training of `policy` on `pairs`, with log π of `reference`."""

    def __init__(self, ctx: StageContext[TrainParams], process: Process) -> None:
        super().__init__(ctx, process)
        self._own_terms = None
        if ctx.params.objective == "python":
            custom = ctx.params.python
            self._own_terms = UserObjective(ctx.path("code"), custom.function, custom.settings)
        self._models = {name: ctx.model(name) for name in ("policy", "reference")}
        is_published = ctx.params.numerics == "paper"
        self._kappa = KappaController(
            ctx.params, has_bonus=ctx.params.has_bonus, may_vanish=is_published
        )
        self.tokenizer = load_tokenizer(self._models["policy"])
        self._pairs, num_truncated = load_pairs(ctx.paths("pairs"), ctx.params)
        if self._models["policy"] != self._models["reference"]:
            require_same_tokenizer(self._models["policy"], self._models["reference"])
        self.set_plan(self._pairs, ctx.params.global_batch_pairs, self._models.values())
        self._loaded: ResponseLogprobs | None = None
        self._cautions: list[str] = []
        process.events.info(
            f"{len(self._pairs)} pairs ({sum(pair.tie for pair in self._pairs)} ties), "
            f"{self.plan.num_steps} steps of {self.plan.global_batch} pairs"
        )
        if num_truncated:
            process.events.warning(
                f"{num_truncated} pairs were cut to {ctx.params.max_length_tokens} tokens"
            )

    def prepare(self) -> None:
        """Computes log π_ref, or reads what an earlier attempt computed."""
        params = self.ctx.params
        stage = params.deepspeed.zero_stage
        layers = "compiled" if self.compiled else "eager"
        # An attempt with other kernels or types rounds differently: its parts are not read.
        folder = f"reference-{self.numerics.device.type}-{params.row_layout}-zero-{stage}-{layers}"
        self._ref_logprobs = reference.compute_reference(
            self._pairs,
            self._reference_model,
            self.ctx.work / folder,
            numerics=self.numerics,
            params=params,
            process=self.process,
        )
        self._gap = self._compare_with_sampler()
        # Hooks of DeepSpeed's and the reference that they are of hold each other.
        gc.collect()

    def load_model(self) -> ResponseLogprobs:
        """The policy; the reference's very model if their weights are the same."""
        model = self._loaded or self._load("policy")
        self._loaded = None
        return model

    def make_objective(self, engine: Engine) -> PairObjective:
        """L − κ · L_bonus + weighted NLL."""
        return PairObjective(
            engine,
            self.process,
            self.ctx.params,
            self._kappa,
            self._own_terms,
            self._ref_logprobs,
        )

    def write_records(self, log: StepLog) -> None:
        """Writes log π_ref and the summary."""
        params = self.ctx.params
        rows = reference.reference_rows(self._pairs, self._ref_logprobs)
        write_table(self.ctx.out / reference.FILE, reference.REFERENCE_LOGPROBS, rows)
        summary = {
            "steps": self.plan.num_steps,
            "kappa": log.records[-1]["kappa"],
            "reference_minus_sampler": self._gap,
            "cautions": self._cautions,
            "metrics": _epoch_means(log.records, params.epochs),
        }
        self.ctx.write_json("summary.json", summary)

    def _load(self, name: str) -> ResponseLogprobs:
        return load_logprob_model(self._models[name], self.ctx.params, self.numerics)

    @contextmanager
    def _reference_model(self) -> Iterator[nn.Module]:
        params = self.ctx.params
        if params.deepspeed.zero_stage == 3:
            from stages.training.zero import sharded_logprob_model

            load = partial(self._load, "reference")
            with sharded_logprob_model(load, params, self.numerics) as engine:
                yield engine
            return
        whole = self._load("reference").eval()
        if self.compiled:
            compile_layers(whole.policy)
        yield whole
        leave_layers_eager(whole.policy)
        is_same = self._models["policy"] == self._models["reference"]
        if is_same and params.deepspeed.zero_stage == "off":
            # The same weights: training starts from this very model.
            self._loaded = whole

    def _compare_with_sampler(self) -> reference.Gap:
        """Difference of log π_ref to the sampler's log-probabilities, small for the same weights.

        Raises:
            UserError: The weights were the same, and the difference shows that something is wrong.
        """
        gap = reference.difference_to_sampler(self._pairs, self._ref_logprobs)
        mean = gap["mean"]
        is_previous = self.ctx.params.reference == "previous"
        is_sampler = is_previous and len(self.ctx.paths("pairs")) == 1
        if mean is None or not is_sampler:
            return gap
        finding = (
            f"log π_ref and the sampler's log-probabilities differ by {mean:.2g} nats a token in "
            f"the mean, at most by {gap['max']:.2g}"
        )
        if mean > GREATEST_GAP:
            raise UserError(
                f"{finding}: other weights or other tokens were sampled than are trained",
                "sample again from this policy and its tokenizer with generate.dtype=float32 and "
                "generate.backend=transformers; if they agree then, the sampler's engine is wrong",
            )
        if mean > LARGE_GAP:
            caution = f"{finding}; set generate.dtype=float32, or sample by transformers"
            self.process.events.warning(caution)
            self._cautions = [caution]
        return gap


def _epoch_means(records: list[dict[str, Any]], epoch: int) -> dict[str, float]:
    """Means of an epoch's metrics over its pairs."""
    chosen = [record for record in records if record["epoch"] == epoch]
    total = sum(record["num_pairs"] for record in chosen)
    names = [name for name in chosen[0] if name not in _COUNTED + TIMINGS]
    return {
        name: sum(record[name] * record["num_pairs"] for record in chosen) / total for name in names
    }


FIT = PairFit
