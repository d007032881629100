"""Weight updates from Megatron's layout to the engines' layout, shard to shard, verified by digests.

    planner         which region of which shard goes to which rank: arithmetic, once for each kind of layer
    exchange        the trainer's ranks send each other these regions, point to point        (gloo or NCCL)
    ipc             a rank shares buckets of the engine's tensors with the worker on its device (memfd or CUDA IPC)
    vllm_receiver   vLLM's worker copies them into its own parameters and answers with their digests

No tensor is gathered whole, and no byte is sent twice. `resharder` runs the sender's side. vLLM's worker quantizes
weights to FP8 itself (`vllm_fp8`). If vLLM changes a model in another way during loading, full tensors are sent instead
(`full_tensor_reason`).
"""
