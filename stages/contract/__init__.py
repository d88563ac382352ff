"""The contract between orchestrator and stages: requests, manifests, the store, tables, events.

Pydantic, pyarrow and the standard library only: importable wherever a stage or a flow runs.
"""
