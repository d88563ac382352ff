"""The reward of the chat task: the share of the rules that a sentence on the topic keeps."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# A sentence needs as many; below them rules are kept by saying nothing.
_FEWEST_WORDS = 4

_KEPT: dict[str, Callable[[str, Mapping[str, Any]], bool]] = {
    "lowercase": lambda text, rule: text == text.lower(),
    "uppercase": lambda text, rule: text == text.upper(),
    "no_commas": lambda text, rule: "," not in text,
    "at_most": lambda text, rule: len(text.split()) <= rule["words"],
    "begins_with": lambda text, rule: _words(text)[:1] == [rule["text"].lower()],
    "ends_with": lambda text, rule: text.endswith(rule["text"]),
    "contains": lambda text, rule: rule["text"] in _words(text),
    "lacks": lambda text, rule: rule["text"] not in _words(text),
    "quoted": lambda text, rule: len(text) > 1 and text[0] == text[-1] == '"',
}


def score(
    prompts: Sequence[Sequence[Mapping[str, str]]],
    responses: Sequence[str],
    references: Sequence[str | None],
) -> list[dict[str, float]]:
    """Scores sentences between 0 and 1; those off the topic, or of fewer than 4 words, get 0."""
    return [_score_one(*each) for each in zip(responses, references, strict=True)]


def _score_one(response: str, reference: str | None) -> dict[str, float]:
    asked = json.loads(reference or "")
    text = response.strip()
    words = _words(text)
    # "river" speaks of rivers.
    on_topic = any(word.startswith(asked["topic"].rstrip("s")) for word in words)
    sentence = len(words) >= _FEWEST_WORDS and "\n" not in text
    kept = [float(_KEPT[rule["rule"]](text, rule)) for rule in asked["rules"]]
    share = sum(kept) / len(kept) if on_topic and sentence else 0.0
    return {
        "score": share,
        "on_topic": float(on_topic),
        "one_line": float(sentence),
        "all_rules": float(share == 1.0),
    }


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())
