from stages.contract.program import main
from stages.evaluate.run import STAGE

main(STAGE)
