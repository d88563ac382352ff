"""End-of-sequence ids of a checkpoint of the hub, whose generation configuration may not answer."""

import pytest
from huggingface_hub import constants

from benchmarks.rehearsal_server import HubHandler
from stages.generate.params import GenerateParams
from stages.generate.policy import load_policy
from stages.harness.context import ModelSource
from tests.local_hub import COMMIT
from tests.scripted_server import served
from tests.tiny_models import EOS_ID, make_tiny_llama

TURN_END_ID = 5
PARAMS = GenerateParams(max_new_tokens=4)
NAME = "generation_config.json"


class _Hub(HubHandler):
    """A hub of one model, which refuses the generation configuration on request."""

    commit = COMMIT
    refuses = False

    def _file(self, repo, names):
        if self.refuses and names == [NAME]:
            self._send(403, b"", {})
        else:
            super()._file(repo, names)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    handler = type("Handler", (_Hub,), {"folder": tmp_path})
    model = make_tiny_llama(tmp_path / "models/owner/model")
    (model / NAME).write_text(f'{{"eos_token_id": [{EOS_ID}, {TURN_END_ID}]}}')
    with served(handler) as url:
        template = url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield handler


SOURCE = ModelSource("owner/model", COMMIT)


@pytest.mark.parametrize(("exists", "expected"), [(True, {EOS_ID, TURN_END_ID}), (False, {EOS_ID})])
def test_a_checkpoint_need_not_have_a_generation_configuration(hub, exists, expected):
    if not exists:
        (hub.folder / "models/owner/model" / NAME).unlink()
    assert load_policy(SOURCE, PARAMS).stop_ids == expected


def test_a_hub_that_does_not_answer_is_an_error(hub):
    """Else responses would go on past the end of the turn."""
    hub.refuses = True
    with pytest.raises(OSError, match="owner/model"):
        load_policy(SOURCE, PARAMS)
