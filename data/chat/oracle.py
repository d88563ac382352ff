"""The reward of the chat task: the share of the rules that a sentence on the topic keeps."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# A sentence needs as many; below them rules are kept by saying nothing.
_FEWEST_WORDS = 4

# Words that a sentence about the topics hardly does without; what lacks them all is a fragment.
# fmt: off
_VERBS = {
    "am", "is", "are", "was", "were", "be", "been", "has", "have", "had", "do", "does", "did",
    "can", "could", "will", "would", "shall", "should", "may", "might", "must", "isn't", "aren't",
    "don't", "doesn't", "can't", "it's", "that's", "there's", "they're", "i'm", "we're", "make",
    "makes", "made", "give", "gives", "take", "takes", "need", "want", "love", "loves", "like",
    "bring", "brings", "come", "comes", "go", "goes", "keep", "keeps", "help", "helps", "know",
    "live", "lives", "grow", "grows", "move", "moves", "play", "plays", "work", "works", "look",
    "looks", "feel", "feels", "find", "finds", "seem", "seems", "become", "becomes", "provide",
    "offer", "create", "creates", "use", "used", "using", "run", "runs", "fly", "sing", "sings",
    "dance", "dances", "shine", "shines",
}
# fmt: on

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


def every_rule(
    prompts: Sequence[Sequence[Mapping[str, str]]],
    responses: Sequence[str],
    references: Sequence[str | None],
) -> list[dict[str, float]]:
    """All or nothing: 1 for a sentence that keeps every rule, which few of the base's do."""
    scored = score(prompts, responses, references)
    return [{"score": each["all_rules"], "share": each["score"]} for each in scored]


def second_opinion(
    prompts: Sequence[Sequence[Mapping[str, str]]],
    responses: Sequence[str],
    references: Sequence[str | None],
) -> list[dict[str, float]]:
    """The same, but rules count in whole sentences only; training never sees these scores.

    A whole sentence ends with a full stop, an exclamation or a question mark, has a verb, and says
    nothing three times.
    """
    scored = score(prompts, responses, references)
    whole = [float(_is_whole(each.strip())) for each in responses]
    return [
        {"score": each["score"] * is_whole, "whole": is_whole}
        for each, is_whole in zip(scored, whole, strict=True)
    ]


def _is_whole(text: str) -> bool:
    words = _words(text)
    said_thrice = any(words.count(word) > 2 for word in words if len(word) > 3)
    return text.endswith((".", "!", "?")) and not _VERBS.isdisjoint(words) and not said_thrice


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())
