"""Place of artifacts, run records and the model registry: a folder, or its mirror in a bucket."""
