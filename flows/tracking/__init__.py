"""Trackers of a run: one session for each, with the run's figures by iteration."""
