"""Stages in containers of this host's Docker engine."""
