"""Models of transformers sharded by torch (`fully_shard`), with the rows, scores, files and reports of `engine`.

This package does not import Megatron, and does not depend on Ray.
"""
