"""Says in one line what is wrong with the Python that would make the environments."""

import sys

if sys.version_info < (3, 11):
    sys.exit(
        f"geb needs Python 3.11 or newer; {sys.executable} is {sys.version.split()[0]}. "
        "Name another one: make setup PYTHON=python3.12"
    )
