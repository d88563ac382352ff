"""The cost of a run in words."""

from flows.planning.estimate import RunEstimate


def cost_line(estimate: RunEstimate) -> str:
    """Tokens, time and GPU-hours of what the store lacks."""
    lacking = estimate.lacking
    tokens = 0.0
    gpu_hours = 0.0
    measured = 0
    uncounted = []
    for step in lacking:
        tokens += step.tokens
        gpu_hours += step.gpu_hours
        measured += step.measured
        if step.seconds is None and step.stage not in uncounted:
            uncounted.append(step.stage)
    least = "at least" if uncounted else "about"
    parts = [f"{tokens:,.0f} tokens", f"{least} {duration(estimate.seconds)}"]
    if gpu_hours:
        parts.append(f"{gpu_hours:.3g} GPU-hours")
    if uncounted:
        parts.append(f"without {', '.join(uncounted)}")
    if measured:
        parts.append(f"{measured} of {len(lacking)} steps by measured rates")
    return f"estimate: {', '.join(parts)}"


def duration(seconds: float | None) -> str:
    """A duration for a person: `4.2 s`, `3 min 05 s`, `2 h 07 min`."""
    if seconds is None:
        return "-"
    tenths = round(seconds, 1)
    if tenths < 60:
        return f"{tenths:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min"
