"""The paper's toy experiment, which needs no pipeline."""
