"""K responses of a policy for every prompt of a shard, with token ids and log-probabilities."""
