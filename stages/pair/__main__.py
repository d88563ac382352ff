from stages.harness.program import main
from stages.pair.run import STAGE

main(STAGE)
