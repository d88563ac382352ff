from stages.harness.program import main
from stages.preferences.run import STAGE

main(STAGE)
