"""Execution of a run's steps under Prefect, its plan, and its record in the store."""
