"""Arrow tables between stages: schemas, meanings of their columns, readers and writers, joins."""
