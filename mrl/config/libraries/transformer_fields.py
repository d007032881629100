"""Megatron's settings of a model and its computation: set by mrl, accepted, or refused.

Every field of `TransformerConfig`, and of its form for multi-latent attention, is in one of the three groups, in both
Megatron versions (tests/config/test_fields.py). Fields that describe the model come from its `config.json`: another
value would train a model that no export describes.
"""

from __future__ import annotations

from mrl.config.libraries.megatron_fields import ADDRESS, CUT, DROPPED, LOW_PRECISION, RANDOM, UNSEEN, FieldRules

_FILE = "the model's config.json"
_HEAD = "mrl computes log-probs from hidden states itself, in chunks"
_OVERLAP = "it needs Transformer Engine's user buffers, which mrl does not create"
_SCHEDULE = "it needs a schedule of forward and backward passes that mrl does not run"
_HOST = "activations on the host have not been tested with memory that is moved off the device between phases"
_DISPATCH = "its kernels have not been compared with the plain exchange of tokens"
_INFERENCE = "it is for Megatron's own inference; vLLM generates here"
_UNREAD = "the layers that mrl builds do not read it"
_NO_SUCH_LAYER = "no model family of mrl has such layers or scales"
_CONTEXT = "context parallelism has been tested only as set by parallel.cp"
_STAGES = "the schedule over pipeline stages has been tested only with Megatron's default order and sizes"
_REPLAY = "it has no effect: the engine's routes are not sent to the trainer"
_PRECISION = "it changes how sums are rounded, and has not been compared in a run"
_FUSED = "the fused kernel exists only on GPUs and has not been compared with the plain one"

OWNED = {
    "tensor_model_parallel_size": "{role}.parallel.tp",
    "pipeline_model_parallel_size": "{role}.parallel.pp",
    "virtual_pipeline_model_parallel_size": "{role}.parallel.vpp",
    "num_layers_in_first_pipeline_stage": "{role}.parallel.first_stage_layers",
    "num_layers_in_last_pipeline_stage": "{role}.parallel.last_stage_layers",
    "pipeline_model_parallel_layout": "{role}.parallel.first_stage_layers and last_stage_layers",
    "account_for_embedding_in_pipeline_split": "{role}.parallel.first_stage_layers",
    "account_for_loss_in_pipeline_split": "{role}.parallel.last_stage_layers",
    "context_parallel_size": "{role}.parallel.cp",
    "expert_model_parallel_size": "{role}.parallel.ep",
    "expert_tensor_parallel_size": "{role}.parallel.etp",
    "sequence_parallel": "{role}.parallel.sequence_parallel",
    **dict.fromkeys(
        (
            # sizes
            *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
            # norms, activations, biases
            *("normalization", "layernorm_epsilon", "layernorm_zero_centered_gamma", "activation_func"),
            *("gated_linear_unit", "glu_linear_offset", "activation_func_clamp_value"),
            *("add_bias_linear", "add_qkv_bias", "qk_layernorm", "qk_l2_norm"),
            *("apply_residual_connection_post_layernorm", "attention_output_gate"),
            # attention
            *("softmax_scale", "softmax_type", "rotary_interleaved", "no_rope_freq", "mrope_section"),
            *("window_size", "window_attn_skip_freq", "multi_latent_attention", "apply_query_key_layer_scaling"),
            *("experimental_attention_variant", "linear_attention_freq", "heterogeneous_block_specs"),
            # multi-latent attention, and its rotary embedding
            *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
            *("rope_type", "rotary_base", "rotary_percent", "rotary_scaling_factor"),
            *("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
            # experts
            *("num_moe_experts", "moe_ffn_hidden_size", "moe_layer_freq", "moe_latent_size"),
            *("moe_router_topk", "moe_router_topk_limited_devices", "moe_router_num_groups", "moe_router_group_topk"),
            *("moe_router_pre_softmax", "moe_router_topk_scaling_factor", "moe_router_score_function"),
            *("moe_shared_expert_intermediate_size", "moe_shared_expert_gate", "moe_apply_probs_on_input"),
            "moe_router_enable_expert_bias",
            # more heads, other layers
            *("mtp_num_layers", "is_hybrid_model"),
        ),
        _FILE,
    ),
    **dict.fromkeys(("params_dtype", "pipeline_dtype", "bf16", "fp16"), "{role}.dtype"),
    "calculate_per_token_loss": "mrl, to true: the loss is normalized over the global batch",
    "variable_seq_lengths": "mrl, to true: micro-batches differ in length",
    "perform_initialization": "mrl, to false: weights come from files",
    "use_cpu_initialization": "cluster.device",
    "disable_parameter_transpose_cache": "mrl, to true: gradients of all micro-batches are added in the same way",
    "moe_token_dispatcher_type": "mrl, to alltoall: no other exchange of tokens has been tested",
    "moe_router_dtype": "mrl, to fp32: engines route in float32",
    "moe_router_load_balancing_type": "mrl, to none: the loss is only the algorithm's",
    "moe_router_bias_update_rate": "{role}.router_bias_update_rate",
    "overlap_p2p_comm": "{role}.parallel.vpp",
    "batch_p2p_comm": "mrl, to false: messages of two stages keep their order only if sent separately",
    "attention_softmax_in_fp32": "mrl, to true: engines compute it in float32",
    "transformer_impl": "mrl: Transformer Engine's layers where it is installed, else its own",
    "clone_scatter_output_in_embedding": "mrl, to true: the whole embedding can be freed",
    "barrier_with_L1_time": "mrl, which does not read Megatron's timers",
    **dict.fromkeys(
        ("finalize_model_grads_func", "grad_scale_func", "no_sync_func", "grad_sync_func", "param_sync_func"),
        "mrl, to its own schedule's function",
    ),
    **dict.fromkeys(
        ("init_method", "output_layer_init_method", "embedding_init_method"),
        "mrl: weights come from files, so they are never initialized",
    ),
}
"""Field -> the setting that determines it, in words that follow "set by"."""

TRANSFORMER = FieldRules(
    taken={
        # Compared with a plain run in tests/engine/test_megatron_settings.py.
        "recompute_granularity": (),
        "recompute_method": (),
        "recompute_num_layers": (),
        # moe_act only on GPUs, with grouped experts; mla_up_proj only with multi-latent attention
        "recompute_modules": ("core_attn", "mlp", "moe", "moe_act", "mla_up_proj"),
        "bias_activation_fusion": (),
        "bias_dropout_fusion": (),
        # Only on GPUs, where they are on by default; checked by tests/contracts and benchmarks/gpu.py.
        "apply_rope_fusion": (),
        "gradient_accumulation_fusion": (),
        "moe_grouped_gemm": (),
        "moe_permute_fusion": (),
    },
    refused={
        # precision
        **dict.fromkeys(("*fp8*", "*fp4*", "first_last_layers_bf16", "num_layers_at_*_in_bf16"), LOW_PRECISION),
        **dict.fromkeys(("*kitchen*", "quant_recipe", "tp_only_amax_red", "moe_router_padding_*"), LOW_PRECISION),
        **dict.fromkeys(("fp32_residual_connection", "disable_bf16_reduced_precision_matmul"), _PRECISION),
        **dict.fromkeys(("enable_autocast", "autocast_dtype", "batch_invariant_mode"), _PRECISION),
        "deterministic_mode": "Transformer Engine needs environment variables that workers do not have",
        # another policy, another loss
        "moe_aux_loss_coeff": CUT,
        "moe_z_loss_coeff": CUT,
        "moe_router_quantile_balancing_ema": CUT,
        **dict.fromkeys(("moe_input_jitter_eps", "*_dropout", "moe_router_force_*"), RANDOM),
        **dict.fromkeys(("moe_*capacity*", "moe_token_drop*", "moe_pad_expert*", "moe_paged_stash*"), DROPPED),
        "qk_clip*": "it changes weights outside the optimizer, so engines would match only by chance",
        "moe_enable_routing_replay": _REPLAY,
        "*grad_scale_func": "the loss is already normalized over the global batch",
        "experimental_attention_variant_loss_scale_func": "the loss is already normalized over the global batch",
        # exchange of tokens between experts
        **dict.fromkeys(("moe_enable_deepep", "moe_flex_*", "moe_deepep_*", "*hybridep*", "moe_ncclep_*"), _DISPATCH),
        **dict.fromkeys(("moe_extended_tp", "moe_use_legacy_grouped_gemm"), "Megatron has removed it"),
        **dict.fromkeys(("overlap_moe_*", "delay_wgrad_compute", "ep_overlap_*", "overlap_dispatch_*"), _SCHEDULE),
        **dict.fromkeys(("high_priority_a2a_comm_stream", "mlp_chunks_for_training"), _SCHEDULE),
        "moe_router_fusion": _FUSED,
        **dict.fromkeys(("use_grouped_gemm_for_*", "moe_single_grouped_*", "moe_*glu_interleave_size"), _FUSED),
        **dict.fromkeys(("fused_residual_rmsnorm", "use_transformer_engine_op_fuser", "fused_single_qkv_rope"), _FUSED),
        **dict.fromkeys(("use_te_activation_func", "use_fused_weighted_squared_relu"), _FUSED),
        "moe_shared_expert_*": _DISPATCH,
        **dict.fromkeys(("dsa_*", "linear_*", "*mamba*", "mtp_*", "*mup*"), _NO_SUCH_LAYER),
        "hetereogenous_dist_checkpoint": _NO_SUCH_LAYER,
        # recomputation and offload
        "moe_layer_recompute": "use recompute_modules: [moe] instead",
        "distribute_saved_activations": "it excludes sequence parallelism, which saves as much",
        "num_microbatches_with_partial_activation_checkpoints": "the number of micro-batches differs from step to step",
        **dict.fromkeys(("*cpu_offloading*", "*offload*"), _HOST),
        # communication
        **dict.fromkeys(("tp_comm_*", "symmetric_ar_type"), _OVERLAP),
        "async_tensor_model_parallel_allreduce": "Megatron has removed it",
        **dict.fromkeys(
            ("*gtp_weight_remat_size", "*tensor_parallel_num_weight_shards"), "weights are split only by parallel.tp"
        ),
        **dict.fromkeys(("cp_comm_type", "hierarchical_context_parallel_sizes", "hybrid_context_parallel"), _CONTEXT),
        "max_seqlen_per_dp_cp_rank": _CONTEXT,
        **dict.fromkeys(("batch_p2p_sync", "use_ring_exchange_p2p", "overlap_p2p_comm_warmup_flush"), _STAGES),
        **dict.fromkeys(("deallocate_pipeline_outputs", "microbatch_group_size_per_vp_stage"), _STAGES),
        "pipeline_model_parallel_comm_backend": _STAGES,
        # heads, kernels, memory
        **dict.fromkeys(("cross_entropy_*", "defer_embedding_wgrad_compute", "wgrad_deferral_limit"), _HEAD),
        **dict.fromkeys(("masked_softmax_fusion", "persist_layer_norm", "memory_efficient_layer_norm"), _UNREAD),
        **dict.fromkeys(
            ("attention_backend", "flash_attention_version"), "Transformer Engine chooses the fastest kernel that fits"
        ),
        **dict.fromkeys(("*cuda_graph*", "moe_pad_experts_for_cuda_graph_inference"), ADDRESS),
        **dict.fromkeys(
            ("init_method_std", "embedding_init_method_std", "init_model_with_meta_device"), "weights come from files"
        ),
        **dict.fromkeys(("use_te_rng_tracker", "inference_*", "use_inference_*", "flash_decode"), _INFERENCE),
        **dict.fromkeys(("nccl_all_reduce_for_prefill", "mlp_chunks_for_prefill"), _INFERENCE),
        "cache_mla_latents": _INFERENCE,
        "mla_down_proj_fusion": "it joins two parameters that the tables keep apart",
        **dict.fromkeys(("log_max_attention_logit", "moe_per_layer_logging", "config_logger_dir", "timers"), UNSEEN),
        "test_mode": UNSEEN,
    },
)
