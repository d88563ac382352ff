"""Stage `train`: preference pairs to the next policy."""

from stages.harness.program import Stage
from stages.train.params import TrainParams
from stages.training.launch import train

STAGE = Stage(TrainParams, train)
