"""A dialogue: what a model says in it is what the generate stage samples from it."""

import json

from tokenizers.processors import TemplateProcessing

from stages.modeling.chat import render_prompt
from tests.forking import forked_python
from tests.programs import run_program
from tests.tiny_models import BOS_ID, CHAT_TEMPLATE, make_tiny_llama, make_tiny_tokenizer

QUESTION = "two red birds ?"


def test_an_answer_is_the_stage_s_likeliest_response(generate, tmp_path):
    """Also where the tokenizer adds the BOS, and one file alone knows what ends a turn."""
    model = make_tiny_llama(tmp_path / "model")
    tokenizer = make_tiny_tokenizer(chat_template=CHAT_TEMPLATE.removeprefix("{{ bos_token }}"))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS_ID)]
    )
    tokenizer.save_pretrained(model)
    messages = [{"role": "user", "content": QUESTION}]
    assert render_prompt(tokenizer, messages)[0] == BOS_ID

    def sampled() -> dict[str, object]:
        return generate([QUESTION], model=model, num_samples=1, temperature=0.0)[0][0]

    # A token that the model says on its way ends the turn.
    ids = sampled()["response_token_ids"]
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": ids[-3]}))
    expected = sampled()
    assert expected["finish_reason"] == "stop"
    done = run_program(
        *(forked_python(), "-m", "stages.generate.dialogue", f"model={model}"),
        *("--max-new-tokens", "12"),
        input=f"{QUESTION}\n",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"model: {expected['response'].strip()}\n"


def test_a_conversation_ends_where_the_model_s_context_does(tmp_path):
    """Beyond it there are answers from positions that the model never saw, or a crash."""
    model = make_tiny_llama(tmp_path / "model", max_position_embeddings=24)
    done = run_program(
        *(forked_python(), "-m", "stages.generate.dialogue", f"model={model}"), input="red ?\n" * 9
    )
    assert done.returncode == 64
    assert "the conversation with model fills its context of 24 tokens" in done.stderr
