"""Trial of a ``python`` oracle: ``python -m stages.score.trial CODE FUNCTION CERTAINTY ROWS.json``.

Loads the function in the score stage's environment and calls it once on the rows, so that a run
learns before it pays for anything that its oracle cannot work. Exit code 64, and the message and
remedy as JSON on stdout, where it cannot. With the certainty ``made-up``, and not ``read``, the
rows are no prompts of the run, and an error that the function raises on them tells nothing. A trial
that comes to its end says so on stdout: an oracle may end the process.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from stages.contract.errors import EXIT_FAILED, EXIT_OK, EXIT_USER, GebError, UserError
from stages.score.python_function import load_file

TRIED = "tried"


def main() -> int:
    """Tries the oracle that the command line names."""
    code, function, certainty, rows = sys.argv[1:]
    with os.fdopen(os.dup(1), "w") as answer:
        # Prints of the oracle go to stderr, also those of programs that it starts.
        os.dup2(2, 1)
        try:
            oracle = load_file(Path(code), function)
            try:
                list(oracle.score(json.loads(Path(rows).read_text())))
            except UserError as error:
                # What the function raised is the cause of the error.
                if certainty == "read" or error.__cause__ is None:
                    raise
        except UserError as error:
            answer.write(json.dumps({"message": error.message, "remedy": error.remedy}))
            return EXIT_USER
        except GebError as error:
            sys.stderr.write(f"{error}\n")
            return EXIT_FAILED
        answer.write(TRIED)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
