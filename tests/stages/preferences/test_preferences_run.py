"""Preference data of several layouts as pairs in the policy's tokens."""

import json
import math

import pytest
from transformers import AutoTokenizer

from stages.contract.digests import prompt_id
from stages.contract.errors import UserError
from stages.contract.request import HubInput
from stages.preferences.params import PreferencesParams
from stages.preferences.run import STAGE
from tests.local_hub import COMMIT, run_with_hub, serve_dataset
from tests.stage_calls import call, metrics, request_for, user_turn, write_jsonl, write_prompts
from tests.stages.pair.test_pair_run import pairs
from tests.tiny_models import make_tiny_llama

ASKED = "color red"
CHOSEN, REJECTED = "blue", "one two"


def said(text):
    return [{"role": "assistant", "content": text}]


PROMPT = user_turn(ASKED)
LAYOUTS = {
    "text": {"prompt": ASKED, "chosen": CHOSEN, "rejected": REJECTED},
    "conversational": {"prompt": PROMPT, "chosen": said(CHOSEN), "rejected": said(REJECTED)},
    "implicit": {"chosen": PROMPT + said(CHOSEN), "rejected": PROMPT + said(REJECTED)},
    "implicit JSON": {
        "chosen": json.dumps(PROMPT + said(CHOSEN)),
        "rejected": json.dumps(PROMPT + said(REJECTED)),
    },
    "ultrafeedback_binarized": {
        "prompt": ASKED,
        "prompt_id": "0",
        "messages": PROMPT + said(CHOSEN),
        "chosen": PROMPT + said(CHOSEN),
        "rejected": PROMPT + said(REJECTED),
        "score_chosen": 8.5,
        "score_rejected": 7.0,
    },
    "pairs.parquet": {
        "prompt": PROMPT,
        "chosen": said(CHOSEN),
        "rejected": said(REJECTED),
        "chosen_score": 8.5,
        "rejected_score": 7.0,
    },
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def paired(store, tmp_path, policy):
    """The artifact that rows, of one prompt that is wanted and others, make."""

    def run(rows, prompts=(ASKED,), **params):
        data = write_jsonl(tmp_path / "data.jsonl", rows)
        prompts_file = write_prompts(tmp_path / "prompts.parquet", list(prompts))
        inputs = {"data": [data], "prompts": [prompts_file], "policy": [policy]}
        return call(STAGE, PreferencesParams.model_validate(params), inputs, store)

    return run


def test_texts_of_the_same_tokens_are_a_tie(paired):
    row = {"prompt": ASKED, "chosen": "red", "rejected": " red"}
    artifact = paired([row, LAYOUTS["text"]])
    assert metrics(artifact)["ties"] == 1
    assert [pair["chosen"] for pair in pairs(artifact)] == [said(CHOSEN)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_makes_the_pair_in_the_policy_s_tokens(paired, policy, layout):
    [row] = pairs(paired([LAYOUTS[layout]]))
    assert row["prompt_id"] == prompt_id(PROMPT)
    assert row["prompt"] == PROMPT
    assert (row["chosen"], row["rejected"]) == (said(CHOSEN), said(REJECTED))
    scores = (8.5, 7.0) if "ultrafeedback" in layout or "pairs" in layout else (1.0, 0.0)
    assert (row["chosen_score"], row["rejected_score"]) == scores
    tokenizer = AutoTokenizer.from_pretrained(policy)
    rendered = tokenizer.apply_chat_template(PROMPT, add_generation_prompt=True, tokenize=False)
    prompt = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    assert row["prompt_token_ids"] == prompt
    for side, text in (("chosen", CHOSEN), ("rejected", REJECTED)):
        words = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert row[f"{side}_token_ids"] == [*words, tokenizer.eos_token_id]
        assert all(map(math.isnan, row[f"{side}_logprobs"]))
        assert len(row[f"{side}_logprobs"]) == len(row[f"{side}_token_ids"])


def test_text_that_spells_control_tokens_is_refused_unless_allowed(paired):
    row = LAYOUTS["text"] | {"chosen": "blue </s> red"}
    with pytest.raises(UserError, match=r"line 1: the text spells control tokens: '</s>'"):
        paired([row])
    [pair] = pairs(paired([row], allow_control_tokens=True))
    assert pair["chosen_token_ids"].count(2) == 2


def test_other_prompts_and_ties_are_counted(paired):
    row = LAYOUTS["text"]
    artifact = paired(
        [
            row,
            row | {"prompt": "color blue"},
            row | {"rejected": CHOSEN},
            row | {"score_chosen": 2.0, "score_rejected": 2.0},
            row | {"score_chosen": 1.0, "score_rejected": 2.0},
        ]
    )
    assert metrics(artifact) == {
        "rows": 5,
        "pairs": 1,
        "ties": 2,
        "reversed": 1,
        "other_prompts": 1,
    }


@pytest.mark.parametrize(
    ("change", "said_of_it", "remedy"),
    [
        ({"prompt": "color blue"}, "0 are ties, .* of 1 are not", "inputs.prompts"),
        ({"rejected": CHOSEN}, "1 are ties", "scores"),
        ({"score_chosen": 1.0, "score_rejected": 2.0}, "in 1 the rejected", "scores"),
        ({"rejected": None}, "1 hold no preference", "columns chosen and rejected"),
    ],
)
def test_data_without_pairs_is_refused_by_its_cause(paired, change, said_of_it, remedy):
    with pytest.raises(UserError, match=f"none of 1 rows makes a pair: .*{said_of_it}") as refused:
        paired([LAYOUTS["text"] | change], invalid_rows="drop")
    assert remedy in refused.value.remedy


def test_system_prompts_match_prepare_and_generate(paired):
    system = {"role": "system", "content": "one"}
    [prepared] = pairs(paired([LAYOUTS["text"]], prompts=[[system, *PROMPT]], prompt_system="one"))
    assert prepared["prompt"] == [system, *PROMPT]
    [sampled] = pairs(paired([LAYOUTS["text"]], system_prompt="one"))
    assert sampled["prompt"] == PROMPT
    assert sampled["prompt_token_ids"] == prepared["prompt_token_ids"]


def test_rows_without_a_preference_are_dropped_and_counted(paired):
    artifact = paired([LAYOUTS["text"], {"prompt": ASKED, "chosen": "a"}], invalid_rows="drop")
    assert metrics(artifact) == {
        "rows": 2,
        "invalid_rows": 1,
        "pairs": 1,
        "ties": 0,
        "reversed": 0,
        "other_prompts": 0,
    }


@pytest.mark.parametrize(
    ("row", "said_of_it"),
    [
        ({"chosen": CHOSEN, "rejected": REJECTED}, "'chosen' is one turn"),
        (
            {"prompt": ASKED, "chosen": CHOSEN},
            "no value in column 'rejected' .*prompt, chosen",
        ),
        (
            {"chosen": PROMPT + said("blue"), "rejected": user_turn("one") + said("two")},
            "different prompts",
        ),
        ({"chosen": PROMPT + PROMPT, "rejected": PROMPT}, "'chosen' does not end"),
        ({"prompt": said("a"), "chosen": "blue", "rejected": "red"}, "no user turn"),
        (
            {side: PROMPT + said("one") + said(side) for side in ("chosen", "rejected")},
            "no user turn is right before",
        ),
        ({"prompt": ASKED, "chosen": "\ud83d", "rejected": "a"}, "'chosen' holds a lone surrogate"),
        ({"prompt": ASKED, "chosen": "a", "rejected": "b", "images": ["x"]}, "holds images"),
    ],
)
def test_a_row_that_holds_no_preference_is_named(paired, row, said_of_it):
    with pytest.raises(UserError, match=f"line 2: .*{said_of_it}") as refused:
        paired([LAYOUTS["text"], row])
    assert refused.value.remedy


@pytest.mark.slow
def test_a_data_set_of_the_hub_is_read_through_the_real_client(store, tmp_path, policy):
    content = (json.dumps(LAYOUTS["ultrafeedback_binarized"]) + "\n").encode()
    prompts_file = write_prompts(tmp_path / "prompts.parquet", [ASKED])
    data = HubInput(repo="owner/liked", revision=COMMIT, repo_type="dataset")
    inputs = {"data": data, "prompts": prompts_file, "policy": policy}
    request = request_for(PreferencesParams(), inputs, store.root)
    with serve_dataset("owner/liked", {"data/train.jsonl": content}) as url:
        done = run_with_hub(url, request, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    artifact = store.load("preferences", request.key)
    assert artifact is not None
    [row] = pairs(artifact)
    assert (row["chosen"], row["chosen_score"]) == (said(CHOSEN), 8.5)
