"""One process of a training: started by torch's elastic agent."""

from stages.train.params import TrainParams
from stages.train.run import load_fit
from stages.training.worker import work

if __name__ == "__main__":
    work(TrainParams, load_fit)
