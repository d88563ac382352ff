"""Stages in pods of a Kubernetes cluster."""
