"""The commands of ``geb``, a module per theme."""
