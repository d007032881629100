"""The trainer. Read `ppo.py` first: one step of PPO and its relatives is one page there."""
