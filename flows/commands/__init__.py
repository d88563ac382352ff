"""The commands of ``geb``, a module per theme.

Prefect, scipy and matplotlib take seconds to load: a command that needs them imports them itself.
"""
