"""Compilers that torch.compile calls: looked for before anything starts."""

from __future__ import annotations

import os
import shutil

from stages.contract.errors import UserError

# As torch's inductor looks for them on a CPU, and triton on a GPU.
_NAMES = {False: ("CXX", ("g++",)), True: ("CC", ("gcc", "clang"))}


def require_compiler(stage: str, *, on_gpu: bool) -> None:
    """Checks that torch.compile would find its compiler on this machine.

    Args:
        stage: The stage that is to compile, for the message.
        on_gpu: Whether it computes on a GPU.

    Raises:
        UserError: There is none, or torch is forbidden to compile.
    """
    remedy = f"or set {stage}.compile=false"
    if os.environ.get("TORCHDYNAMO_DISABLE", "") == "1":
        raise UserError(
            f"{stage}.compile is set, and TORCHDYNAMO_DISABLE=1 in the environment forbids torch "
            "to compile",
            f"unset TORCHDYNAMO_DISABLE where there is a compiler, {remedy}",
        )
    variable, usual = _NAMES[on_gpu]
    named = os.environ.get(variable)
    names = (named,) if named else usual
    if not any(map(shutil.which, names)):
        raise UserError(
            f"{stage}.compile needs a compiler, and there is no {' or '.join(names)} on this "
            "machine",
            f"install {usual[0]}, {remedy}",
        )
