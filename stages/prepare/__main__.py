from stages.harness.program import main
from stages.prepare.run import STAGE

main(STAGE)
