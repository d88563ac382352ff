"""Stages as jobs of a Slurm cluster."""
