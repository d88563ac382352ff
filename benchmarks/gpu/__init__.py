"""What one GPU can do: the head, training steps, sampling; without a network."""
