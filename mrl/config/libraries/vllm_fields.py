"""vLLM's engine arguments: set by mrl, accepted, or refused.

`rollout/vllm_engine.py` sets exactly the keys in `OWNED`, so `mrl check` and the engine refuse the same keys. Every
field is in one of the three groups (tests/config/test_fields.py).
"""

from __future__ import annotations

from mrl.config.libraries.megatron_fields import FieldRules

_WEIGHTS = "mrl: the trainer sends weights"
_SPLIT = "an engine is split only by tp, and mrl places it"
_REQUESTS = "mrl's requests do not use it"
_TEXT_ONLY = "mrl trains language models only"
_LAYERS = "no model family of mrl has such layers"
_WATCHED = "mrl does not read its reports"
_ADAPTERS = "mrl trains and sends whole weights, so an adapter would never be used"
_CACHES = "cached data would outlive a change of weights"
_HOST_WEIGHTS = "weights on the host have not been tested with weight updates from the trainer"
_MODEL = "engines generate with the trainer's model and its tokenizer"
_DRAFTS = "a draft model gets no weights from the trainer, and its log-probs have not been compared with the trainer's"
_NOT_ASKED = "it has no effect: mrl reads only samples and their log-probs"
_CODE = "it loads more code into the engine"

_EITHER = {
    "tensor_parallel_size": "{role}.tp",
    "trust_remote_code": "mrl, to false: code from a model's repository is never run",
}
OWNED = {
    **_EITHER,
    "model": "model.path",
    "pipeline_parallel_size": "{role}.pp",
    "data_parallel_size": "{role}.tp (the actor's pool holds as many engines as fit)",
    "max_model_len": "rollout.max_prompt_tokens and rollout.max_response_tokens",
    "distributed_executor_backend": "{role}.tp and pp: an engine of one device is one process",
    "skip_tokenizer_init": "mrl: engines read token ids, and text only for `stop`",
    "disable_log_stats": "mrl, to true: its own metrics count tokens and times",
    "logprobs_mode": "mrl, to processed_logprobs: ratios need the log-probs of the sampled distribution",
    "max_logprobs": "mrl: sampling masks are read as log-probs",
    "enable_sleep_mode": "mrl: engines on GPUs make room while the trainer works",
    "weight_transfer_config": _WEIGHTS,
    "worker_extension_cls": _WEIGHTS,
    "load_format": _WEIGHTS,
    "seed": "training.seed: every sample has its own seed",
    "enable_chunked_prefill": "mrl: vLLM decides on GPUs; off on a CPU, where sampling noise cannot be rewound",
}
"""Field -> the setting that determines it, in words that follow "set by"."""
OWNED_BY_JUDGE = {
    **_EITHER,
    "model": "judge.path",
    "pipeline_parallel_size": "{role}.tp (a judge has no pipeline)",
    "served_model_name": "mrl",
    "data_parallel_size": "{role}.tp (the judge's pool holds as many engines as fit)",
    "max_model_len": "judge.max_tokens",
}

_MEMORY = (
    *("gpu_memory_utilization", "kv_cache_memory_bytes", "kv_cache_dtype", "kv_cache_dtype_skip_layers", "block_size"),
    *("num_gpu_blocks_override", "enable_prefix_caching", "prefix_caching_hash_algo", "watermark"),
    *("disable_hybrid_kv_cache_manager", "enable_cumem_allocator"),
)
_BATCHES = (
    *("max_num_seqs", "max_num_batched_tokens", "max_num_scheduled_tokens", "long_prefill_token_threshold"),
    *("long_prefill_token_threshold_adaptive", "prefill_schedule_interval", "scheduler_reserve_full_isl"),
    *("performance_mode", "stream_interval", "async_scheduling"),
)
_KERNELS = (
    *("dtype", "quantization", "quantization_config", "allow_deprecated_quantization", "enforce_eager"),
    *("cudagraph_capture_sizes", "max_cudagraph_capture_size", "compilation_config", "optimization_level"),
    *("attention_backend", "attention_config", "kernel_config", "ir_op_priority", "moe_backend", "linear_backend"),
    *("enable_flashinfer_autotune", "disable_custom_all_reduce", "disable_cascade_attn", "use_fp64_gumbel"),
    *("enable_expert_parallel", "enable_batch_sharded_sampling", "hf_overrides"),
)
_MACHINE = (
    *("numa_bind", "numa_bind_nodes", "numa_bind_cpus", "distributed_timeout_seconds"),
    *("cpu_distributed_timeout_seconds", "max_parallel_loading_workers", "safetensors_load_strategy"),
    *("safetensors_prefetch_num_threads", "safetensors_prefetch_block_size", "use_tqdm_on_load", "log_level"),
    *("jit_monitor_mode", "jit_monitor_verbose", "shutdown_timeout", "fail_on_environ_validation"),
)
_NOWHERE = {
    **dict.fromkeys(
        ("*data_parallel*", "nnodes", "node_rank", "master_*", "device_ids", "*context_parallel*", "dcp_*", "cp_*"),
        _SPLIT,
    ),
    **dict.fromkeys(("dp_*", "*dbo*", "ubatch_size", "*eplb*", "*elastic_ep*", "all2all_backend"), _SPLIT),
    **dict.fromkeys(("expert_placement_strategy", "enable_ep_weight_filter", "_api_process_*"), _SPLIT),
    **dict.fromkeys(("disable_nccl_for_dp_synchronization", "*fault_tolerance*", "enable_nccl_comm_suspend"), _SPLIT),
    **dict.fromkeys(("kv_transfer_config", "ec_transfer_config", "ec_manager_config", "kv_events_config"), _CACHES),
    **dict.fromkeys(("worker_cls", "scheduler_cls", "model_class_overrides", "logits_processors"), _CODE),
    **dict.fromkeys(("io_processor_plugin", "*_plugin"), _CODE),
    **dict.fromkeys(
        ("runner", "convert", "pooler_config", "diffusion_config", "tokens_only"), "the model must generate text"
    ),
    "model_weights": "weights are in the directory of config.json",
    **dict.fromkeys(("allowed_*_media_*", "allowed_media_domains", "*_mm_*", "mm_*", "*media*"), _TEXT_ONLY),
    **dict.fromkeys(("language_model_only", "video_*", "enable_prompt_embeds", "renderer_num_workers"), _TEXT_ONLY),
    **dict.fromkeys(("*mamba*", "*replayssm*", "gdn_*", "kda_*", "engram_config", "sparse_indexer_*"), _LAYERS),
    **dict.fromkeys(("kv_sharing_fast_prefill", "swa_bounded_replay", "prefix_match_unit"), _LAYERS),
    "show_hidden_metrics_for_version": _WATCHED,
    **dict.fromkeys(
        ("otlp_*", "collect_detailed_traces", "*_metrics", "*_metrics_sample", "profiler_config"), _WATCHED
    ),
    **dict.fromkeys(("enable_layerwise_nvtx_tracing", "enable_logging_*", "enable_log_*", "*_logging"), _WATCHED),
    **dict.fromkeys(("logging_config", "log_config_file", "ray_workers_use_nsight", "enable_trace_replay"), _WATCHED),
}
"""Fields refused for both engines and judges."""

ENGINE = FieldRules(
    taken=dict.fromkeys((*_MEMORY, *_BATCHES, *_KERNELS, *_MACHINE), ()),
    refused={
        **_NOWHERE,
        "enable_return_routed_experts": "use algorithm.router_replay=R3, which sets it",
        "return_sampling_mask": "use algorithm.keep_sampling_mask, which reads masks as log-probs",
        **dict.fromkeys(("aux_output_config", "max_num_queued_*", "max_num_active_seqs"), _NOT_ASKED),
        **dict.fromkeys(("*lora*", "specialize_active_lora"), _ADAPTERS),
        **dict.fromkeys(("speculative_config", "spec_*"), _DRAFTS),
        **dict.fromkeys(("kv_offloading_*", "prefix_cache_retention_interval"), _CACHES),
        **dict.fromkeys(("*offload*", "sleep_preserve_parameter_names"), _HOST_WEIGHTS),
        **dict.fromkeys(("tokenizer*", "*revision", "hf_config_path", "config_format", "served_model_name"), _MODEL),
        **dict.fromkeys(("model_impl", "generation_config", "override_generation_config"), _MODEL),
        **dict.fromkeys(("disable_sliding_window", "hf_token", "download_dir"), _MODEL),
        **dict.fromkeys(("model_loader_extra_config", "ignore_patterns", "pt_load_map_location"), _MODEL),
        **dict.fromkeys(
            ("structured_outputs_config", "reasoning_*", "watermark_config", "scheduling_policy"), _REQUESTS
        ),
        "additional_config": "it is for other platforms",
    },
)
"""Fields of `rollout.vllm`. The log-prob comparison checks every engine against the trainer, with any kernels."""
JUDGE = FieldRules(
    taken={
        **(ENGINE.taken or {}),
        **dict.fromkeys(
            (
                # Nothing trains on a judge's log-probs, so users decide how its model is loaded and answers.
                *("tokenizer", "tokenizer_mode", "tokenizer_revision", "revision", "code_revision", "hf_config_path"),
                *("config_format", "hf_token", "download_dir", "load_format", "model_impl", "skip_tokenizer_init"),
                *("model_loader_extra_config", "ignore_patterns", "pt_load_map_location", "additional_config"),
                *("generation_config", "override_generation_config", "disable_sliding_window", "seed"),
                *("structured_outputs_config", "reasoning_parser", "reasoning_config", "watermark_config"),
                *("speculative_config", "spec_method", "spec_model", "spec_tokens", "scheduling_policy"),
                *("cpu_offload_gb", "cpu_offload_params", "offload_backend", "offload_group_size"),
                *("offload_num_in_group", "offload_prefetch_step", "offload_params"),
                *("kv_offloading_size", "kv_offloading_backend", "prefix_cache_retention_interval"),
                *("max_logprobs", "logprobs_mode", "max_num_queued_reqs", "max_num_queued_tokens"),
                *("max_num_active_seqs", "enable_chunked_prefill", "disable_log_stats"),
                "distributed_executor_backend",
            ),
            (),
        ),
    },
    refused={
        **_NOWHERE,
        **dict.fromkeys(("*lora*", "specialize_active_lora"), "requests use only the model judge.path"),
        **dict.fromkeys(("weight_transfer_config", "worker_extension_cls"), "a judge's weights do not change"),
        **dict.fromkeys(("enable_sleep_mode", "sleep_preserve_parameter_names"), "a judge has its own devices"),
        **dict.fromkeys(("enable_return_routed_experts", "return_sampling_mask", "aux_output_config"), _REQUESTS),
    },
)
"""Fields of `judge.vllm`."""
