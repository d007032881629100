"""Fresh weights from Megatron's layout into the engines', shard to shard; each tensor's digest is compared.

    planner         which region of which shard goes to which rank: arithmetic, once for each kind of layer
    exchange        the trainer's ranks send each other these regions, point to point        (gloo or NCCL)
    ipc             a rank shares buckets of the engine's tensors with the worker on its device (memfd or CUDA IPC)
    vllm_receiver   vLLM's worker copies them into its own parameters and answers with the digests of what it holds

No tensor is gathered whole and no byte is sent twice. `resharder` runs the sender's half, `spec` tells every rank who
takes part. A model that vLLM changes while it loads takes whole tensors instead (`full_tensor_reason`).
"""
