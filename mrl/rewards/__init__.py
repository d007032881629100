"""Rewards: `RewardManager` scores samples in worker processes; one built-in reward is one file in `functions/`."""
