"""The weights' way from Megatron's layout into the rollout engines that share its devices."""
