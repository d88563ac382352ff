"""Studies that use the pipeline from outside: the paper's tables, and its bandit.

A custom study starts from :mod:`experiments.study`; docs/research.md says how.
"""
