import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import LlamaModel

from stages.contract.errors import UserError
from tests.stage_calls import response, score_params
from tests.stages.score.responses import conversation_ids
from tests.tiny_models import CHAT_TEMPLATE
from tests.tiny_urm import change_weights, make_tiny_urm

ATTRIBUTES = ("helpfulness", "correctness", "coherence", "complexity", "verbosity")
# Float32 sums in another order.
ROUNDING = 1e-4
ROWS = [
    response("one two", 0, "red"),
    response("one two", 1, "blue green cat dog bird"),
    response("three ?", 0, "cat runs"),
    response("three ?", 1, "one two three four one two three four"),
]


def selu(x):
    """Klambauer et al. 2017, with their constants."""
    scale, alpha = 1.0507009873554805, 1.6732632423543772
    return scale * np.where(x > 0, x, alpha * np.expm1(x))


def expected(path, rows):
    """Means and gate weights: states by transformers' Llama one by one, head and gate by numpy."""
    backbone = LlamaModel.from_pretrained(path, dtype=torch.float32).eval()
    tensors = {
        name: tensor.astype(np.float64)
        for name, tensor in load_file(path / "model.safetensors").items()
        if name.startswith(("score", "weights"))
    }
    means, gates = [], []
    for ids in conversation_ids(path, rows):
        with torch.inference_mode():
            state = backbone(torch.tensor([ids])).last_hidden_state[0, -1].double().numpy()
        means.append((tensors["score.weight"] @ state)[0::2])
        for layer in ("0", "2", "4"):
            name = f"weights.fc.{layer}"
            state = tensors[f"{name}.weight"] @ state + tensors[f"{name}.bias"]
            state = state if layer == "4" else selu(state)
        gates.append(state)
    return np.array(means), np.array(gates)


@pytest.fixture(scope="module")
def urm(tmp_path_factory):
    return make_tiny_urm(tmp_path_factory.mktemp("urm") / "model")


@pytest.fixture
def score(score_rows):
    def run(model, rows=ROWS, **params):
        settings = score_params(**{"oracle": "urm_gated", "dtype": "float32", **params})
        return score_rows(settings, rows, model=model)

    return run


class TestScores:
    @pytest.mark.parametrize("oracle", ["urm_gated", "urm_helpfulness"])
    def test_rows_tell_score_means_gates_and_checkpoint(self, score, urm, oracle):
        means, gates = expected(urm, ROWS)
        names = [*ATTRIBUTES, *(f"gate_{name}" for name in ATTRIBUTES)]
        rows = score(urm, oracle=oracle)
        for row, values in zip(rows, np.hstack([means, gates]), strict=True):
            assert [name for name, _ in row["components"]] == names
            assert [value for _, value in row["components"]] == pytest.approx(values, abs=ROUNDING)
            assert row["oracle"].startswith(f"{oracle}:")
        scores = [row["score"] for row in rows]
        gated = (means * gates).sum(axis=1)
        assert np.ptp(scores) > 0.1
        reading = gated if oracle == "urm_gated" else means[:, 0]
        assert scores == pytest.approx(reading, abs=ROUNDING)

    def test_head_and_gate_stay_in_float32(self, score, urm):
        means, gates = expected(urm, ROWS)
        for row in score(urm, dtype="bfloat16"):
            parts = dict(row["components"])
            total = sum(parts[name] * parts[f"gate_{name}"] for name in ATTRIBUTES)
            assert row["score"] == pytest.approx(total, abs=1e-5)
        near = [row["score"] for row in score(urm, dtype="bfloat16")]
        spread = np.std((means * gates).sum(axis=1))
        assert near == pytest.approx((means * gates).sum(axis=1), abs=spread / 2)


class TestCheckpoint:
    @pytest.mark.parametrize(
        ("template", "change", "message"),
        [
            (None, {"drop": "weights."}, r"lacks 6 weights.*weights\.fc\.0\.bias"),
            ("{{ bos_token }}" + CHAT_TEMPLATE, {}, "doubled BOS"),
            (CHAT_TEMPLATE.removeprefix("{{ bos_token }}"), {}, "do not open with the BOS"),
        ],
        ids=["no-gate", "doubled-bos", "no-bos"],
    )
    def test_what_is_not_as_published_is_refused(self, score, tmp_path, template, change, message):
        model = make_tiny_urm(tmp_path / "urm", chat_template=template or CHAT_TEMPLATE)
        change_weights(model, **change)
        with pytest.raises(UserError, match=message):
            score(model)
