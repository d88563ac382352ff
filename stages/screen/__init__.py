"""Screen stage: prompts without those that the starting policy solves."""
