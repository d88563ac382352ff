"""Starts ``geb``, or names the extra that the installation lacks."""

import sys

from stages.contract.errors import EXIT_USER


def main() -> None:
    """Runs the command line."""
    try:
        from flows.commands.cli import main as run_geb
    except ModuleNotFoundError as error:
        if str(error.name).startswith(("flows", "stages", "experiments")):
            raise
        sys.stderr.write(
            f"error package {error.name!r} is not installed\n"
            "remedy pip install 'geb[orchestrator,torch]'\n"
        )
        sys.exit(EXIT_USER)
    run_geb()


if __name__ == "__main__":
    main()
