"""vLLM's engine without this project around it, for ``benchmarks.generation``.

Takes its settings as JSON on the command line; the last line of stdout is a JSON object with the
seconds of ``LLM.generate`` and the tokens that it gave.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import pyarrow.parquet as pq


def main() -> None:
    """Renders the prompts, starts the engine, samples."""
    settings = json.loads(sys.argv[1])
    # As in the stage: the engine in this process.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from transformers import AutoConfig, AutoTokenizer
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.platforms import current_platform

    tokenizer: Any = AutoTokenizer.from_pretrained(settings["model"])
    rendered = [
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        for messages in pq.read_table(settings["prompts"])["messages"].to_pylist()
    ]
    gib = settings["kv_cache_gib"]
    # As in the stage: on CPUs seeds and prompts read in pieces do not go together.
    longest = AutoConfig.from_pretrained(settings["model"]).max_position_embeddings
    whole = {"enable_chunked_prefill": False, "max_num_batched_tokens": max(longest, 4096)}
    engine = LLM(
        settings["model"],
        skip_tokenizer_init=True,
        load_format="safetensors",
        dtype=settings["dtype"],
        max_num_seqs=settings["max_num_seqs"],
        enforce_eager=settings["enforce_eager"],
        kv_cache_memory_bytes=None if gib is None else int(gib * 2**30),
        enable_prefix_caching=True,
        **(whole if current_platform.is_cpu() else {}),
    )
    prompts = []
    sampling = []
    for number, token_ids in enumerate(rendered):
        for sample in range(settings["num_samples"]):
            prompts.append(TokensPrompt(prompt_token_ids=token_ids))
            exact = {"seed": 1000 * number + sample, "logprobs": 0} if settings["seeds"] else {}
            sampling.append(
                SamplingParams(
                    max_tokens=settings["max_new_tokens"],
                    stop_token_ids=[tokenizer.eos_token_id],
                    detokenize=False,
                    **exact,
                )
            )
    started = time.perf_counter()
    cpu_started = time.process_time()
    outputs = engine.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - started
    cpu_seconds = time.process_time() - cpu_started
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(json.dumps({"seconds": seconds, "cpu_seconds": cpu_seconds, "tokens": tokens}))


if __name__ == "__main__":
    main()
