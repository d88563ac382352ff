"""Screen stage: prompts that the starting policy does not solve."""
