"""Training engine that the stages `train` and `sft` share: rows, steps, processes, checkpoints."""
