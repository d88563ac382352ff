"""Parts of the training benchmark: its shapes and data, and those that are compared."""
