"""An oracle of another package: a section, a row and a module."""

from typing import Literal

from stages.contract.params import Settings
from stages.harness.program import Stage
from stages.score.oracle import OracleVerdict
from stages.score.params import ORACLES, OracleEntry, ScoreParams
from stages.score.run import STAGE
from stages.tables.schemas import RESPONSES, SCORES, read_rows, write_table
from tests.stage_calls import call_request, request_for
from tests.stages.score.responses import response_rows


class ToySettings(Settings):
    bonus: float = 0.0


class ToyParams(ScoreParams):
    oracle: Literal["toy", "math_verify"] = "toy"
    toy: ToySettings = ToySettings()


class ToyOracle:
    identity = "toy:1"

    def __init__(self, bonus):
        self.bonus = bonus

    def score(self, rows):
        for place, row in enumerate(rows):
            yield place, OracleVerdict(len(row["response"]) + self.bonus)


def load(ctx):
    """Makes the oracle, as an oracle's module does."""
    return ToyOracle(ctx.params.toy.bonus)


def test_an_oracle_is_a_section_a_row_and_a_module(monkeypatch, tmp_path):
    """The places that CONTRIBUTING names: nothing else has to know of it."""
    monkeypatch.setitem(ORACLES, "toy", OracleEntry(__name__, "toy"))
    write_table(tmp_path / "responses.parquet", RESPONSES, response_rows())
    inputs = {"responses": tmp_path / "responses.parquet"}

    def request(**settings):
        return request_for(ToyParams(**settings), inputs, tmp_path / "store")

    stage = Stage(ToyParams, STAGE.run)
    artifact, _ = call_request(stage, request(toy={"bonus": 0.5}))
    scores = list(read_rows(artifact.path / "scores.parquet", SCORES))
    assert [score["score"] for score in scores] == [
        len(row["response"]) + 0.5 for row in response_rows()
    ]
    assert {row["oracle"] for row in scores} == {"toy:1"}
    assert request(toy={"bonus": 0.5}).key != request().key == request(judge={"max_tokens": 9}).key
    other = request(oracle="math_verify").key
    assert request(oracle="math_verify", toy={"bonus": 0.5}).key == other
