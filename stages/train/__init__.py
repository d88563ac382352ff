"""Stage `train`: f-DPO with an exploratory bonus, from preference pairs to the next policy."""
