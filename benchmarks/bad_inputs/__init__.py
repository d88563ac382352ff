"""Bad inputs to the command line: settings, commands, oracles, data files, checkpoints."""
