"""Stages as jobs of a Ray cluster: a runner of geb in a package of its own."""
