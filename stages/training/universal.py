"""DeepSpeed's universal checkpoints: a training goes on with another number of processes.

DeepSpeed writes one file of optimizer state per process. Its converter joins them into one tensor
per weight, which any number of processes can load.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

# File that DeepSpeed writes last, and reads first.
MARK = "latest_universal"


def can_convert(written: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """True where a checkpoint of one layout can go on as another: only the processes may differ."""
    is_sharded = written["zero_stage"] != "off"
    return is_sharded and written["zero_stage"] == wanted["zero_stage"]


def convert(checkpoint: Path) -> None:
    """Adds the universal form to a checkpoint; one process calls this.

    Args:
        checkpoint: Folder with DeepSpeed's ``global_step<n>``; it takes as much room again.
    """
    from deepspeed.checkpoint import ds_to_universal

    written = checkpoint / (checkpoint / "latest").read_text().strip()
    converted = checkpoint / f"{written.name}_universal"
    # Of a conversion that was interrupted.
    shutil.rmtree(converted, ignore_errors=True)
    converted.mkdir()
    asked = Namespace(
        input_folder=str(written),
        output_folder=str(converted),
        # In this process: a forked one may hang on the threads of torch.
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        # Says which weights are split among model-parallel processes: none are here.
        inject_missing_state=True,
    )
    with contextlib.redirect_stdout(sys.stderr):
        ds_to_universal.main(asked)


def mend_optimizer(optimizer: Optimizer, weight_decays: Sequence[float]) -> None:
    """Puts right what DeepSpeed 0.19 does wrong when ZeRO-3 loads a universal checkpoint.

    It gives all weights one tensor that counts the steps, which the optimizer then advances once
    for each of them, and all groups the first one's weight decay.

    Args:
        optimizer: The one that DeepSpeed wraps.
        weight_decays: Those of its groups.
    """
    for state in optimizer.state.values():
        state["step"] = state["step"].clone()
    for group, weight_decay in zip(optimizer.param_groups, weight_decays, strict=True):
        group["weight_decay"] = weight_decay
