from stages.harness.program import main
from stages.train.run import STAGE

main(STAGE)
