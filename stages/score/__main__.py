from stages.harness.program import main
from stages.score.run import STAGE

main(STAGE)
