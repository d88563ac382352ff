"""Records of runs that no stage has made."""

from flows.execution.run_record import StepRecord


def recorded(record, step, **changes):
    """Saves a step of a run, done unless the changes say otherwise."""
    values = {"step": step, "stage": "train", "key": "0" * 64, "key_fields": {}, "state": "done"}
    times = {"started": 1.0, "ended": 2.0}
    saved = StepRecord.model_validate(values | times | changes)
    record.save_step(saved)
    return saved
