"""A dialogue with one or two checkpoints: ``python -m stages.generate.dialogue NAME=MODEL …``.

Reads a message a line from stdin and prints each model's answer. An empty line begins a new
conversation, end-of-file ends. Uses transformers; each model has its own side of it.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from typing import Any


@dataclass
class _Partner:
    """One model and the conversation with it."""

    name: str
    model: Any
    tokenizer: Any
    messages: list[dict[str, str]] = field(default_factory=list)

    def answer(self, text: str, max_new_tokens: int, temperature: float) -> str:
        import torch

        self.messages.append({"role": "user", "content": text})
        inputs = self.tokenizer.apply_chat_template(
            self.messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(self.model.device)
        sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {}
        with torch.inference_mode():
            output = self.model.generate(
                **inputs,
                max_new_tokens=max_new_tokens,
                pad_token_id=self.tokenizer.pad_token_id or self.tokenizer.eos_token_id,
                **(sampling or {"do_sample": False}),
            )
        new = output[0, inputs["input_ids"].shape[1] :]
        said = str(self.tokenizer.decode(new, skip_special_tokens=True)).strip()
        self.messages.append({"role": "assistant", "content": said})
        return said


def main() -> None:
    """Talks until stdin ends."""
    from transformers.utils.logging import disable_progress_bar

    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="+", metavar="NAME=MODEL")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0)
    arguments = parser.parse_args()
    disable_progress_bar()
    partners = [_load(*each.split("=", 1)) for each in arguments.models]
    is_person = sys.stdin.isatty()
    if is_person:
        sys.stdout.write("An empty line begins a new conversation; Ctrl-D ends.\n")
    while True:
        if is_person:
            sys.stdout.write("> ")
            sys.stdout.flush()
        line = sys.stdin.readline()
        if not line:
            return
        if not (text := line.strip()):
            for each in partners:
                each.messages.clear()
            continue
        for each in partners:
            said = each.answer(text, arguments.max_new_tokens, arguments.temperature)
            sys.stdout.write(f"{each.name}: {said}\n")
        sys.stdout.flush()


def _load(name: str, place: str) -> _Partner:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    repo, _, revision = place.partition("@")
    chosen = {"revision": revision} if revision else {}
    model = AutoModelForCausalLM.from_pretrained(repo, dtype="auto", **chosen)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return _Partner(name, model.to(device).eval(), AutoTokenizer.from_pretrained(repo, **chosen))


if __name__ == "__main__":
    main()
