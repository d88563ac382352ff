"""Preferences stage: preference pairs that come from outside."""
