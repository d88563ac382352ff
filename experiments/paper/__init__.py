"""The paper's tables and figures, at its own size and at the size of one machine."""
