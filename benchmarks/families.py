"""Every causal language model of the installed transformers, at tiny size, through this project.

    python -m benchmarks.families                # --only llama,mixtral  --json FILE

Builds each model from its configuration class and takes it through the code of the train stage, in
packed and padded rows, all weights and default LoRA targets: log-probabilities before training,
gradients, a few steps, the saved checkpoint loaded by transformers alone. What is compared with is
transformers' own forward pass over each sequence alone. Ends with exit code 1 where a family is
wrong without being refused.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import sys
import tempfile
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from stages.contract.errors import UserError
from stages.harness.context import ModelSource
from stages.modeling.logprobs import ResponseLogprobs, causal_lm
from stages.modeling.save import save_checkpoint
from stages.sft.data import make_word_tokenizer
from stages.train.data import Pair, Response
from stages.train.params import TrainParams
from stages.training.adapters import add_adapters, merge_adapters
from stages.training.batches import ROWS
from stages.training.params import LoraParams, RowLayoutName
from stages.training.policy import Numerics, enable_gradient_checkpointing, load_logprob_model

VOCABULARY = 64
_WINDOW = 4
_LARGEST = 30_000_000
_SECONDS = 240
# Nats per token in float32. Steps move log-probabilities by a hundred times as much at least.
_TOLERANCE = 1e-3
_GRADIENT_TOLERANCE = 1e-2
_STEPS = 3

# Sizes by the names under which configurations know them.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "dim"), 32),
    **dict.fromkeys(("word_embed_proj_dim", "lru_width", "attention_hidden_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 4),
    **dict.fromkeys(("decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff"), 48),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "moe_intermediate_size"), 48),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), 48),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "kv_channels", "d_kv", "v_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("rotary_dim", "qk_rope_head_dim"), 4),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 128),
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state", "linear_num_key_heads"), 4),
    **dict.fromkeys(("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"), 4),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 4),
    **dict.fromkeys(("hidden_size_per_layer_input", "global_head_dim"), 8),
    **dict.fromkeys(("n_groups", "mamba_n_groups", "n_shared_experts"), 1),
    "vocab_size_per_layer_input": VOCABULARY,
    "num_kv_shared_layers": 0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
    "is_decoder": True,
}

# What some families want besides.
_OWN: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": _WINDOW},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8},
    "phi3": {"sliding_window": _WINDOW},
    "mistral": {"sliding_window": _WINDOW},
}

Outcome = tuple[str, str]
"""Outcome of a family in one mode (right, refused, WRONG, crashed, not built), and the detail."""


def main() -> None:
    """Scans, prints a table, and ends with 1 where something is wrong in silence."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="model types, separated by commas")
    parser.add_argument("--json", type=Path, help="write every outcome, a line for each family")
    options = parser.parse_args()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)
    # What is imported on the first use is then in every process that is forked from this one.
    _scan("llama", lambda mode: None)
    found = {}
    for family in options.only.split(",") if options.only else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        found[family] = _in_a_process(family)
        print(family, {mode: ": ".join(each) for mode, each in found[family].items()}, flush=True)
        if options.json:
            with options.json.open("a") as file:
                file.write(json.dumps({family: found[family]}) + "\n")
    print(table(found))
    bad = {"WRONG", "crashed"}
    sys.exit(any(kind in bad for modes in found.values() for kind, _ in modes.values()))


def table(found: dict[str, dict[str, Outcome]]) -> str:
    """Families by what came of them in packed and in padded rows, as Markdown."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for family, modes in found.items():
        if "all" in modes:
            groups["not built", ""].append(family)
        else:
            groups[_cell(modes, "packed"), _cell(modes, "padded")].append(family)
    lines = ["| packed rows | padded rows | number | families |", "| --- | --- | --- | --- |"]
    for cells, families in sorted(groups.items(), key=lambda each: -len(each[1])):
        lines.append(f"| {' | '.join(cells)} | {len(families)} | {', '.join(sorted(families))} |")
    return "\n".join(lines)


def _cell(modes: dict[str, Outcome], layout: str) -> str:
    full, lora = (_short(modes.get(f"{layout} {mode}")) for mode in ("full", "lora"))
    # What peft says of default targets has names of modules, different in every family.
    return full if full == lora else f"{full}; LoRA {lora.partition(':')[0]}"


def _short(outcome: Outcome | None) -> str:
    kind, detail = outcome or ("crashed", "its process ended")
    if kind == "right":
        return kind
    # Without the name of the model and what all refusals of a kind begin with.
    reason = re.sub(r"\b\w*(ForCausalLM|LMHeadModel)\b", "the model", detail)
    reason = re.sub(r"^(the prompts|log-prob).*? it( cannot be computed)?: ", "", reason)
    return f"{kind}: {reason}"


def _in_a_process(family: str) -> dict[str, Outcome]:
    """Scans a family in a process of its own: one that hangs or crashes is only itself lost."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_scan, args=(family, sender.send))
    process.start()
    sender.close()
    found: dict[str, Outcome] = {}
    try:
        while receiver.poll(_SECONDS):
            mode, outcome = receiver.recv()
            found[mode] = outcome
    except EOFError:
        pass
    else:
        found["all"] = ("not built", f"not done in {_SECONDS} s")
        process.kill()
    process.join()
    return found or {"all": ("not built", f"its process ended with {process.exitcode}")}


def _scan(family: str, tell: Callable[[tuple[str, Outcome]], None]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            _build(family, folder / "policy")
            expected = _vanilla(folder / "policy")
        except Exception as error:
            tell(("all", ("not built", _said(error))))
            return
        for layout in ("packed", "padded"):
            for mode in ("full", "lora"):
                try:
                    outcome = _try(folder, layout, LoraParams(rank=4 * (mode == "lora")), expected)
                except UserError as error:
                    outcome = ("refused", error.message.replace(str(folder / "policy"), "it"))
                except Exception as error:
                    traceback.print_exc()
                    outcome = ("crashed", _said(error))
                tell((f"{layout} {mode}", outcome))


def tiny_config(family: str) -> PretrainedConfig:
    """The family's configuration with every size that is known made small."""
    return _shrunk(CONFIG_MAPPING[family])


def _shrunk(config_class: Any) -> PretrainedConfig:
    default = config_class()
    known = set(default.to_dict()) | set(default.attribute_map)
    settings = {name: value for name, value in SIZES.items() if name in known}
    # Under one of its names only.
    for alias, name in default.attribute_map.items():
        if alias in settings and name in settings:
            settings.pop(alias)
    if "qk_rope_head_dim" in settings:
        # Latent attention: all heads have keys, and the width of a head is that of its parts.
        settings.pop("head_dim", None)
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    if isinstance(getattr(default, "sliding_window", None), int):
        settings["sliding_window"] = _WINDOW
    for name in getattr(default, "sub_configs", {}):
        part = getattr(default, name, None)
        if isinstance(part, PretrainedConfig):
            settings[name] = _shrunk(type(part))
    return config_class(**settings | _OWN.get(config_class.model_type, {}))


def _build(family: str, folder: Path) -> None:
    config = tiny_config(family)
    with torch.device("meta"):
        size = sum(each.numel() for each in AutoModelForCausalLM.from_config(config).parameters())
    if size > _LARGEST:
        raise ValueError(f"{size:,} weights: its configuration has sizes by other names")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    make_word_tokenizer(["a word"], max_length=128).save_pretrained(folder)


def _try(folder: Path, layout: RowLayoutName, lora: LoraParams, expected: torch.Tensor) -> Outcome:
    params = TrainParams(row_layout=layout)
    numerics = Numerics.of(params, on_gpu=False, local_rank=0)
    torch.manual_seed(0)
    model = load_logprob_model(ModelSource(str(folder / "policy")), params, numerics)
    if lora.rank:
        model = ResponseLogprobs(add_adapters(model.policy, lora))
    enable_gradient_checkpointing(model.policy, stage="train")
    model.train()
    before = _logprobs(model, layout)
    gap = (before - expected).abs().max().item()
    if not gap <= _TOLERANCE:
        return "WRONG", f"log-probabilities before training differ by {gap:.2g}"
    if not lora.rank:
        gap = _gradient_gap(model, layout, folder)
        if not gap <= _GRADIENT_TOLERANCE:
            return "WRONG", f"gradients differ by {gap:.2g}"
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    for _ in range(_STEPS):
        optimizer.zero_grad()
        _logprobs(model, layout, gradients=True).sum().backward()
        optimizer.step()
    after = _logprobs(model.eval(), layout)
    if (after - before).abs().max() < 100 * _TOLERANCE:
        return "WRONG", "training changes next to nothing"
    state = {name: weight.detach() for name, weight in model.policy.state_dict().items()}
    saved = folder / f"{layout}-{lora.rank}"
    save_checkpoint(
        causal_lm(model.policy),
        merge_adapters(model.policy, state),
        make_word_tokenizer(["a word"], max_length=128),
        torch.float32,
        saved,
    )
    gap = (_vanilla(saved) - after).abs().max().item()
    if not gap <= _TOLERANCE * max(1.0, after.abs().max().item() / 10):
        return "WRONG", f"log-probabilities of the saved checkpoint differ by {gap:.2g}"
    return "right", f"{gap:.1g}"


def _logprobs(
    model: ResponseLogprobs, layout: RowLayoutName, *, gradients: bool = False
) -> torch.Tensor:
    rows = ROWS[layout](_pairs())
    with torch.set_grad_enabled(gradients):
        return rows.logprobs(model)


def _gradient_gap(model: ResponseLogprobs, layout: RowLayoutName, folder: Path) -> float:
    """Largest relative difference to transformers' own gradient, over weights that have one."""
    _logprobs(model, layout, gradients=True).sum().backward()
    found = {name: each.grad for name, each in model.policy.named_parameters()}
    vanilla = AutoModelForCausalLM.from_pretrained(folder / "policy").eval()
    torch.cat(list(_each_alone(vanilla))).sum().backward()
    largest = max(each.grad.norm().item() for each in vanilla.parameters() if each.grad is not None)
    gaps = [0.0]
    for name, weight in vanilla.named_parameters():
        own = found[name]
        if weight.grad is None or own is None:
            present = weight.grad if own is None else own
            gaps.append(0.0 if present is None else present.norm().item() / largest)
        else:
            # Gradients that are nothing but rounding are measured by the largest.
            scale = max(weight.grad.norm().item(), 1e-3 * largest)
            gaps.append((own - weight.grad).norm().item() / scale)
    model.zero_grad()
    return max(gaps)


@torch.no_grad()
def _vanilla(folder: Path) -> torch.Tensor:
    """Log-probabilities of all response tokens, each sequence alone, by transformers only."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return torch.cat(list(_each_alone(model)))


def _each_alone(model: Any) -> Iterator[torch.Tensor]:
    pairs = _pairs()
    for side in ("chosen", "rejected"):
        for pair in pairs:
            response = getattr(pair, side).token_ids
            ids = torch.from_numpy(np.concatenate([pair.prompt, response]).astype(np.int64))
            logits = model(input_ids=ids[None], use_cache=False).logits[0].float()
            start = len(pair.prompt)
            logprobs = logits[start - 1 : -1].log_softmax(-1)
            yield logprobs.gather(1, ids[start:, None]).squeeze(1)


def _pairs() -> list[Pair]:
    random = np.random.default_rng(0)

    def ids(length: int) -> Any:
        return random.integers(3, VOCABULARY, length).astype(np.int32)

    def response(length: int) -> Response:
        return Response(ids(length), np.zeros(length, dtype=np.float32), 0.0)

    lengths = [(5, 9, 7), (3, 2, 11), (8, 1, 4)]
    return [
        Pair(index, str(index), ids(prompt), response(chosen), response(rejected), tie=False)
        for index, (prompt, chosen, rejected) in enumerate(lengths)
    ]


def _said(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"


if __name__ == "__main__":
    main()
