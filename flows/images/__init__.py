"""Container images: what is in each, the wheels they are made of, and how they are built."""
