"""Tiny models of the paper's architectures, and rows in the layouts of its data sets.

    python data/rehearsal/make.py FOLDER

The models learn for seconds to answer in their chat template: a sum in a box, right one time in
four, or a few words.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM as CausalLM
from transformers import (
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from stages.score.urm_oracles import UrmModel

Files = dict[str, bytes]
_PROMPTS, _TEST_PROMPTS = 6, 12
_WORDS = ("red", "blue", "green", "small", "large", "old", "new", "house", "river", "cat", "dog")
_STEPS, _ROWS = 80, 16
_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}


class _Family(NamedTuple):
    """A family of models: architecture, special tokens and chat template.

    Attributes:
        config: Its configuration.
        special: Its special tokens; the first begins a text, the second, of id 1, ends a turn.
        template: Its chat template.
    """

    config: type[PreTrainedConfig]
    special: Sequence[str]
    template: str


_LLAMA3 = _Family(
    LlamaConfig,
    ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<pad>"),
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}"
    "<|end_header_id|>\n\n{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
)
_MISTRAL = _Family(
    MistralConfig,
    ("<s>", "</s>", "[INST]", "[/INST]", "<pad>"),
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'assistant' %} "
    "{{ message.content }}{{ eos_token }}{% else %}[INST] {{ message.content }}[/INST]{% endif %}"
    "{% endfor %}",
)
_QWEN = _Family(
    Qwen2Config,
    ("<|endoftext|>", "<|im_end|>", "<|im_start|>", "<pad>"),
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
)
_POLICIES = {
    "RLHFlow/LLaMA3-SFT": _LLAMA3,
    "mistralai/Mistral-7B-Instruct-v0.3": _MISTRAL,
    "Qwen/Qwen2.5-7B": _QWEN,
}


def make_repositories() -> dict[str, Files]:
    """Every model and data set that the full table reads; the same bytes each time.

    They are named ``models/OWNER/NAME`` and ``datasets/OWNER/NAME``.
    """
    found = {f"models/{name}": _policy(family) for name, family in _POLICIES.items()}
    found["models/LxzGordon/URM-LLaMa-3.1-8B"] = _reward_model()
    for part in (1, 2, 3):
        rows = [{"context_messages": _chat(part * 100 + each)} for each in range(_PROMPTS)]
        found[f"datasets/RLHFlow/ultrafeedback_iter{part}"] = {"data/train.parquet": _table(rows)}
    # Two of the test prompts are training prompts.
    test = [{"context_messages": _chat(90 + each)} for each in range(_TEST_PROMPTS)]
    found["datasets/RLHFlow/test_generation_2k"] = {"data/train.parquet": _table(test)}
    sums = [_sum(number) for number in range(10)]
    found["datasets/BytedTsinghua-SIA/DAPO-Math-17k"] = {
        "data/dapo-math-17k.parquet": _table(
            [
                {
                    "data_source": "math_dapo",
                    "prompt": [{"role": "user", "content": _sum(number)[0]}],
                    "reward_model": {"ground_truth": _sum(number)[1], "style": "rule"},
                }
                for number in range(100, 140)
            ]
        )
    }
    columns = ("problem", "answer")
    problems = _lines([dict(zip(columns, each, strict=True)) for each in sums])
    found["datasets/HuggingFaceH4/MATH-500"] = {"test.jsonl": problems}
    found["datasets/math-ai/aime25"] = {"test.jsonl": problems}
    subset = "OE_TO_maths_en_COMP"
    found["datasets/Hothan/OlympiadBench"] = {
        "README.md": f"---\nconfigs:\n- config_name: {subset}\n  data_files:\n  - split: train\n"
        f"    path: {subset}/{subset}.parquet\n---\n".encode(),
        f"{subset}/{subset}.parquet": _table(
            [{"question": problem, "final_answer": [answer]} for problem, answer in sums]
        ),
    }
    return found


def _chat(number: int) -> list[dict[str, str]]:
    words = random.Random(number).sample(_WORDS, 3)
    return [{"role": "user", "content": f"Tell me of number {number}: {' '.join(words)}."}]


def _sum(number: int) -> tuple[str, str]:
    """A problem and its answer, from 0 to 3."""
    first = number % 4
    return f"What is {first + number} minus {number}?", str(first)


def _answer(draw: random.Random) -> str:
    return " ".join(draw.sample(_WORDS, draw.randint(2, 6)))


def _conversations() -> list[list[dict[str, str]]]:
    """Conversations to learn from: sums with any answer from 0 to 3, words after other prompts."""
    draw = random.Random(0)
    found = []
    for number in range(1000, 1100):
        boxed = f"\\boxed{{{draw.randrange(4)}}}"
        said = {"role": "assistant", "content": boxed}
        found.append([{"role": "user", "content": _sum(number)[0]}, said])
        found.append([*_chat(number), {"role": "assistant", "content": _answer(draw)}])
    return found


def _tokenizer(family: _Family) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = [turn["content"] for each in _conversations() for turn in each]
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=list(family.special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    begin, end, *_ = family.special
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=begin, eos_token=end, pad_token="<pad>"
    )
    fast.chat_template = family.template
    return fast


def _policy(family: _Family) -> Files:
    """Files of a policy that has learned the conversations."""
    tokenizer = _tokenizer(family)
    torch.manual_seed(0)
    model = CausalLM.from_config(_config(family, tokenizer)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    texts = tokenizer.apply_chat_template(_conversations(), tokenize=False)
    draw = random.Random(0)
    for _ in range(_STEPS):
        rows = draw.sample(texts, _ROWS)
        batch = tokenizer(rows, add_special_tokens=False, padding=True, return_tensors="pt")
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return _files(model, tokenizer)


def _reward_model() -> Files:
    tokenizer = _tokenizer(_LLAMA3)
    torch.manual_seed(1)
    config = _config(_LLAMA3, tokenizer)
    config.initializer_range = 0.2
    return _files(UrmModel(config), tokenizer)


def _config(family: _Family, tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
    return family.config(
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **_SIZES,
    )


def _files(model: Any, tokenizer: PreTrainedTokenizerFast) -> Files:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return {each.name: each.read_bytes() for each in sorted(Path(folder).iterdir())}


def _table(rows: list[dict[str, Any]]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return sink.getvalue().to_pybytes()


def _lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


if __name__ == "__main__":
    for repository, files in make_repositories().items():
        for name, content in files.items():
            path = Path(sys.argv[1]) / repository / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
