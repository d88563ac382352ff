from stages.harness.program import main
from stages.sft.run import STAGE

main(STAGE)
