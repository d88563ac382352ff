"""Programs that a test runs to their end."""

import subprocess
from typing import Any


def run_program(*command: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end, well or not; what it prints is kept."""
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, check=False, **options)
