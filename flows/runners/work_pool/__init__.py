"""Stages on the workers of Prefect work pools."""
