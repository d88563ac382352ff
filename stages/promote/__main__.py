from stages.harness.program import main
from stages.promote.run import STAGE

main(STAGE)
