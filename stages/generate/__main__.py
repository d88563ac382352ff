from stages.contract.program import main
from stages.generate.run import STAGE

main(STAGE)
