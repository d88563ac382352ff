"""Where a stage's program executes: one small protocol, one module per runner."""
