"""Checks a URM checkpoint against the two scores on its model card.

    python -m stages.score.urm_check --model LxzGordon/URM-LLaMa-3.1-8B --revision main

The card tokenizes a conversation that its chat template has rendered, so that the tokenizer adds a
second BOS to the template's own. The check reads the pair that way, compares, and shows beside it
the scores with exactly one BOS, which is how the oracles read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stages.contract.context import ModelSource
from stages.contract.errors import EXIT_FAILED, EXIT_OK, EXIT_USER, UserError
from stages.modeling.chat import render_conversation
from stages.modeling.load import DTYPES
from stages.score.urm_oracles import ATTRIBUTES, UrmOutput, load_urm


@dataclass(frozen=True)
class Golden:
    """A conversation of one turn and the score that the card prints for it."""

    prompt: str
    response: str
    score: float

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation."""
        return [
            {"role": "user", "content": self.prompt},
            {"role": "assistant", "content": self.response},
        ]


_QUESTION = "What is the range of the numeric output of a sigmoid node in a neural network?"
GOLDEN_PAIR = (
    Golden(_QUESTION, "The output of a sigmoid node is bounded between -1 and 1.", 2.3285412788),
    Golden(_QUESTION, "The output of a sigmoid node is bounded between 0 and 1.", 12.4380331039),
)
# The card's dtype and device are not said; its gate runs in float16.
TOLERANCE = 0.15


def main(argv: Sequence[str] | None = None, pair: Sequence[Golden] = GOLDEN_PAIR) -> int:
    """Prints a row for each conversation; the exit code says whether all scores agree.

    Args:
        argv: Command line, without the program's name.
        pair: The conversations and their scores.
    """
    options = _parser().parse_args(argv)
    try:
        model, tokenizer = load_urm(ModelSource(options.model, options.revision), options.dtype)
        rows = [(each, *_read_twice(model, tokenizer, each)) for each in pair]
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_USER
    worst = max(abs(card.scores.item() - golden.score) for golden, card, _ in rows)
    for golden, card, one_bos in rows:
        sys.stdout.write(
            f"{golden.response}\n"
            f"  card {golden.score:.4f}   here, tokenized as on the card {card.scores.item():.4f}\n"
            f"  as the oracles read it: urm_gated {one_bos.scores.item():.4f}, {_means(one_bos)}\n"
        )
    agree = worst <= options.tolerance
    sys.stdout.write(
        f"{'agrees' if agree else 'DIFFERS'}: largest difference {worst:.4f}, "
        f"tolerance {options.tolerance:g}\n"
    )
    return EXIT_OK if agree else EXIT_FAILED


def _read_twice(model: Any, tokenizer: Any, golden: Golden) -> tuple[UrmOutput, UrmOutput]:
    """The conversation tokenized as on the card, and with exactly one BOS."""
    text = tokenizer.apply_chat_template(golden.messages, tokenize=False)
    as_on_card = tokenizer(text)["input_ids"]
    return (
        _read(model, as_on_card),
        _read(model, render_conversation(tokenizer, golden.messages)),
    )


@torch.inference_mode()
def _read(model: Any, token_ids: Sequence[int]) -> UrmOutput:
    ids = torch.tensor([token_ids], device=model.device)
    return model(input_ids=ids, attention_mask=torch.ones_like(ids))


def _means(output: UrmOutput) -> str:
    means = output.means[0].tolist()
    return ", ".join(f"{name} {value:.4f}" for name, value in zip(ATTRIBUTES, means, strict=True))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m stages.score.urm_check", description="Checks URM's golden pair."
    )
    parser.add_argument("--model", required=True, help="folder or hub id of the checkpoint")
    parser.add_argument("--revision", default="main", help="of a hub id")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument(
        "--tolerance", type=float, default=TOLERANCE, help="largest difference that passes"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
