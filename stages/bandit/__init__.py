"""Bandit stage: the paper's toy experiment (Appendix "Toy Experiments") on all methods at once."""
