"""One process of a training: started by torch's elastic agent."""

from stages.sft.params import SftParams
from stages.sft.run import load_fit
from stages.training.worker import work

if __name__ == "__main__":
    work(SftParams, load_fit)
