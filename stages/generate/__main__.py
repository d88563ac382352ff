from stages.generate.run import STAGE
from stages.harness.program import main

main(STAGE)
