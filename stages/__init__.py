"""Stages: programs from files to files, and the libraries that they share."""
