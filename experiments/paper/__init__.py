"""The paper's tables and figures, at its own size and at that of one machine."""
