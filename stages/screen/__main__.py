from stages.harness.program import main
from stages.screen.run import STAGE

main(STAGE)
