import json
from pathlib import Path

from flows.execution.plan import differences
from flows.pipeline.loading import load_config

CONFIGS = Path(__file__).parents[2] / "configs"


def test_the_comparison_lacks_the_bonus_and_nothing_else():
    geb, fdpo = (
        json.loads(load_config(CONFIGS / f"{name}.yaml").to_json())
        for name in ("quickstart", "quickstart-fdpo")
    )
    lines = list(differences(geb, fdpo))
    assert [line.partition(":")[0].split()[0] for line in lines] == ["name", "train.design"], lines


def test_the_data_is_enough_for_every_iteration():
    config = load_config(CONFIGS / "quickstart.yaml")
    assert config.prepare.prompts_per_iteration is not None
    wanted = config.prepare.test_prompts + config.iterations * config.prepare.prompts_per_iteration
    [prompts] = config.inputs.prompts
    assert len(Path(prompts).read_text().splitlines()) == wanted
