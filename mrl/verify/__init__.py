"""`mrl verify`: whether a parallel layout computes what transformers computes."""
