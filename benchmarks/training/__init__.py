"""Parts of the training benchmark: its shapes and data, and its contestants."""
