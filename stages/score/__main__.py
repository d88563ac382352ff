from stages.contract.program import main
from stages.score.run import STAGE

main(STAGE)
