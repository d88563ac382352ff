from stages.bandit.run import STAGE
from stages.contract.program import main

main(STAGE)
