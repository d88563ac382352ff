"""A dialogue with one or two checkpoints: ``python -m stages.generate.dialogue NAME=MODEL …``.

A model with a LoRA adapter is named by its base, and the adapter by ``--adapter NAME=FOLDER``.
Reads a message a line from stdin and prints each model's answer. An empty line begins a new
conversation, end-of-file ends. Uses transformers; each model has its own side of it.
"""

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from stages.contract.errors import EXIT_OK, EXIT_USER, UserError
from stages.generate.policy import end_token_ids
from stages.harness.context import ModelSource
from stages.modeling.chat import render_prompt, require_chat_template
from stages.modeling.load import DTYPES, Precision, load_causal_lm, load_config
from stages.modeling.tokenizers import load_tokenizer

# Exit code of a program that Ctrl-C ends, by the shell's convention.
_EXIT_INTERRUPTED = 130


@dataclass
class _Partner:
    """One model and the conversation with it."""

    name: str
    model: Any
    tokenizer: Any
    end_ids: list[int]
    messages: list[dict[str, str]] = field(default_factory=list)

    def answer(self, text: str, max_new_tokens: int, temperature: float) -> str:
        self.messages.append({"role": "user", "content": text})
        # Read and ended as in the samples that the policy was trained on.
        prompt = torch.tensor(
            [render_prompt(self.tokenizer, self.messages)], device=self.model.device
        )
        longest = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        room = max_new_tokens if longest is None else longest - prompt.shape[1]
        if room < 1:
            raise UserError(
                f"the conversation with {self.name} fills its context of {longest} tokens",
                "start anew, and begin another conversation sooner (an empty line)",
            )
        sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {}
        with torch.inference_mode():
            output = self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=min(max_new_tokens, room),
                eos_token_id=self.end_ids or None,
                # One row is never padded; without an id transformers would warn.
                pad_token_id=self.tokenizer.eos_token_id,
                **(sampling or {"do_sample": False}),
            )
        new = output[0, prompt.shape[1] :].tolist()
        if new and new[-1] in self.end_ids:
            new.pop()
        said = str(self.tokenizer.decode(new, skip_special_tokens=True)).strip()
        self.messages.append({"role": "assistant", "content": said})
        return said


def main() -> int:
    """Talks until stdin ends; 64 if a model cannot be loaded, with the reason on stderr."""
    parser = argparse.ArgumentParser(prog="python -m stages.generate.dialogue")
    parser.add_argument("models", nargs="+", metavar="NAME=MODEL", help="folder or ID@REVISION")
    parser.add_argument("--adapter", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0)
    arguments = parser.parse_args()
    disable_progress_bar()
    try:
        adapters = dict(each.split("=", 1) for each in arguments.adapter)
        models = [each.split("=", 1) for each in arguments.models]
        partners = [_load(name, place, adapters.get(name)) for name, place in models]
        _talk(partners, arguments.max_new_tokens, arguments.temperature)
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_USER
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    return EXIT_OK


def _talk(partners: list[_Partner], max_new_tokens: int, temperature: float) -> None:
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
            said = each.answer(text, max_new_tokens, temperature)
            sys.stdout.write(f"{each.name}: {said}\n")
        sys.stdout.flush()


def _load(name: str, place: str, adapter: str | None) -> _Partner:
    """Loads a model in the precision of its checkpoint."""
    # A folder's name may hold an @, too.
    repo, _, revision = (place, "", "") if Path(place).is_dir() else place.partition("@")
    source = ModelSource(repo, revision or None, adapter)
    tokenizer = load_tokenizer(source)
    require_chat_template(tokenizer, repo)
    config = load_config(source)
    stored = config.get_text_config().dtype
    precision: Precision = next((each for each in DTYPES if DTYPES[each] == stored), "float32")
    end_ids = sorted(end_token_ids(tokenizer, config, source))
    return _Partner(name, load_causal_lm(source, dtype=precision), tokenizer, end_ids)


if __name__ == "__main__":
    sys.exit(main())
