"""Runs the training code of any rank at full size on a CPU, on tensors without memory, and measures its memory."""
