"""Studies that use the pipeline from outside: the paper's tables, and its bandit.

A study of one's own starts from :mod:`experiments.study`; docs/research.md says how.
"""
