"""Stage `sft`: conversations, and a policy or an architecture, to a warm-started checkpoint."""

from stages.harness.program import Stage
from stages.sft.params import SftParams
from stages.training.launch import train

STAGE = Stage(SftParams, train)
