"""Promote stage: gates on metrics, and the registry of models."""
