"""Rewards: `RewardManager` scores samples in worker processes; the built-in reward functions are in `functions`."""
