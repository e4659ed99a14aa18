"""Megatron's options: each has been read, and a row says what it does beside partitioned vocabulary layers.

An option that no row names is one that nobody here has read, of a Megatron that is newer than the table. It
may stay at its default; a training that sets it is refused. What the training script itself adds to the
parser is the user's own and passes. A new version's options come in by hand, name by name: no prefix and no
group of its parser takes them in.

Standard library only. Next: ``parsed.py``, which asks it; ``refusals.py``, what is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["works", "refused", "not run", "cannot matter"]
WORKS: Verdict = "works"
REFUSED: Verdict = "refused"
NOT_RUN: Verdict = "not run"
CANNOT_MATTER: Verdict = "cannot matter"


@dataclass(frozen=True, slots=True)
class Row:
    """What is known of some options.

    Attributes:
        verdict: ``works``, as a run beside stock has shown; ``refused``, with some value or beside another
            option; ``cannot matter`` to embedding, output layer, loss, batch, gradients or checkpoint; ``not
            run``, where it may, and nobody has tried.
        reason: where it was run, what of it is refused, why it cannot matter, or what it would touch.
        options: their names in Megatron's parsed arguments.
    """

    verdict: Verdict
    reason: str
    options: tuple[str, ...]


def _row(verdict: Verdict, reason: str, options: str) -> Row:
    return Row(verdict, reason, tuple(options.split()))


ROWS = (
    _row(
        WORKS,
        "beside stock by tests/megatron_lm/test_training.py, on every version",
        """
        num_layers hidden_size num_attention_heads max_position_embeddings add_position_embedding
        make_vocab_size_divisible_by untie_embeddings_and_output_weights attention_dropout
        hidden_dropout weight_decay clip_grad micro_batch_size global_batch_size train_iters
        sequence_parallel seed lr lr_decay_style lr_warmup_iters min_lr tensor_model_parallel_size
        pipeline_model_parallel_size distributed_backend overlap_grad_reduce overlap_param_gather
        use_distributed_optimizer eval_iters eval_interval seq_length
        create_attention_mask_in_dataloader vocab_size
        """,
    ),
    _row(
        WORKS,
        "beside stock by tests/megatron_lm/test_options.py",
        """
        kv_channels group_query_attention num_query_groups position_embedding_type
        use_rotary_position_embeddings use_rope_scaling normalization swiglu rampup_batch_size
        recompute_granularity recompute_method recompute_num_layers calculate_per_token_loss
        train_samples add_bias_linear decoupled_lr decoupled_min_lr fp16 bf16 initial_loss_scale
        decoder_first_pipeline_num_layers eod_mask_loss expert_model_parallel_size num_experts
        moe_router_topk moe_aux_loss_coeff moe_token_dispatcher_type
        """,
    ),
    _row(
        WORKS,
        "beside stock by tests/megatron_lm/test_options.py, run on 22 November 2026 with 0.16.1 and main",
        """
        align_grad_reduce ddp_num_buckets ddp_bucket_size ddp_pad_buckets_for_high_nccl_busbw
        ddp_average_in_collective align_param_gather check_weight_hash_across_dp_replicas_interval
        use_tp_pp_dp_mapping init_method_std embedding_init_method_std dataloader_type num_workers
        reset_position_ids mtp_loss_scaling_factor eval_global_batch_size eval_micro_batch_size
        start_eval_at_iter freeze_all_layers mtp_hsm
        """,
    ),
    _row(
        WORKS,
        "beside stock by tests/megatron_lm/test_schedules.py; what no schedule fits is refused",
        """
        num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank moe_layer_freq
        """,
    ),
    _row(
        WORKS,
        "beside stock by tests/megatron_lm/test_heads.py",
        """
        mtp_num_layers exit_interval spec hybrid_override_pattern mtp_use_repeated_layer
        """,
    ),
    _row(
        WORKS,
        "saved and loaded by tests/megatron_lm/test_checkpoints.py, to and from stock",
        """
        save save_interval no_save_optim load no_load_optim no_load_rng finetune ckpt_step
        """,
    ),
    _row(
        WORKS,
        "beside stock by tests/megatron_lm/test_parameter_groups.py",
        """
        adam_beta1 adam_beta2 adam_eps use_mup mup_base_hidden_size mup_embedding_mult mup_output_mult
        """,
    ),
    _row(
        WORKS,
        "beside stock by tests/megatron_lm/test_initial_weights.py",
        """
        use_cpu_initialization
        """,
    ),
    _row(
        WORKS,
        "beside stock with a stand-in for attention by tests/megatron_lm/test_lengths.py",
        """
        context_parallel_size sft
        """,
    ),
    _row(
        WORKS,
        "run on 22 November 2026 with 0.16.1, four iterations beside stock on pp 2 x dp 2",
        """
        data_parallel_random_init check_for_large_grads enable_gloo_process_groups
        num_distributed_optimizer_instances
        """,
    ),
    _row(
        WORKS,
        "run on 22 November 2026 with 0.16.1, four iterations beside stock on pp 2",
        """
        train_sync_interval log_num_zeros_in_grad check_for_nan_in_loss_and_grad skip_train
        te_rng_tracker
        """,
    ),
    _row(
        WORKS,
        "run on 22 November 2026 with 0.19.0, four iterations beside stock on pp 2",
        """
        disable_jit_fuser
        """,
    ),
    _row(
        WORKS,
        "run on 22 November 2026 with 0.19.0, four iterations beside stock on pp 2 x dp 2; each "
        "rank's file has its own rows",
        """
        save_wgrads_interval save_params_interval
        """,
    ),
    _row(
        WORKS,
        "run on 22 November 2026 with 0.19.0, four iterations beside stock on pp 2 x dp 2 in bf16: "
        "losses to 4e-6, gradient norms to 3e-3",
        """
        ddp_reduce_scatter_with_fp32_accumulation ddp_param_name_patterns_for_fp32_local_accumulation
        """,
    ),
    _row(
        WORKS,
        "run on 22 November 2026 with 0.16.1, four iterations beside stock on pp 2, with sigmoid "
        "scores and a z-loss; the biases also with 0.18.2, 0.19.0 and main",
        """
        moe_router_score_function moe_router_enable_expert_bias moe_router_bias_update_rate
        moe_z_loss_coeff
        """,
    ),
    _row(
        WORKS,
        "run on 22 November 2026 with 0.16.1, four iterations beside stock on pp 2 x dp 2, by its "
        "older name enable_gloo_process_groups",
        """
        use_gloo_process_groups
        """,
    ),
    _row(
        WORKS,
        "run on 22 November 2026 with 0.16.1, four iterations beside stock on pp 2 x dp 2 in bf16: "
        "losses to 3e-6, gradient norms to 3e-3",
        """
        grad_reduce_in_bf16 accumulate_allreduce_grads_in_fp32
        """,
    ),
    _row(
        WORKS,
        "run on 22 November 2026 with 0.16.1 on pp 2 x dp 2: saved, and resumed as stock resumes from it",
        """
        no_save_rng use_checkpoint_args ckpt_fully_parallel_save async_save ckpt_fully_parallel_load
        ckpt_assume_constant_structure dist_ckpt_strictness
        """,
    ),
    _row(
        WORKS,
        "run on 22 November 2026 with 0.16.1, four iterations beside stock on pp 2 x dp 2; with "
        "--overlap-param-gather it is of weights that are partly still to be gathered, in stock as here",
        """
        log_params_norm
        """,
    ),
    _row(
        REFUSED,
        "whenever it is asked for",
        """
        check_for_spiky_loss use_legacy_models auto_detect_ckpt_format ckpt_convert_format
        fp16_lm_cross_entropy defer_embedding_wgrad_compute overlap_param_gather_with_optimizer_step
        use_megatron_fsdp use_torch_fsdp2 overlap_moe_expert_parallel_comm delay_wgrad_compute
        enable_cuda_graph external_cuda_graph cuda_graph_scope inprocess_restart perform_rl_step
        cuda_graph_impl hybrid_context_parallel fine_grained_activation_offloading optimizer_cuda_graph
        fp8_output_proj moe_paged_stash cuda_graph_scope_deprecated cuda_graph_modules
        tensor_parallel_num_weight_shards expert_tensor_parallel_num_weight_shards mtp_detach_heads
        logits_save_dir logits_load_dir enable_mhc_connections logit_dtype save_dgrads_interval
        save_activations_interval
        """,
    ),
    _row(
        REFUSED,
        "other values than those that are run in tests/megatron_lm",
        """
        ckpt_format pipeline_model_parallel_layout rerun_mode
        """,
    ),
    _row(
        REFUSED,
        "with --overlap-param-gather",
        """
        reuse_grad_buf_for_mxfp8_param_ag
        """,
    ),
    _row(
        REFUSED,
        "in a V placement; with 0.16.1 in 1F1B equal to stock on as many stages, 2 and 4",
        """
        reset_attention_mask
        """,
    ),
    _row(
        REFUSED,
        "with model chunks; in 1F1B beside stock by tests/megatron_lm/test_options.py",
        """
        heterogeneous_layers_config_path heterogeneous_layers_config_encoded_json
        """,
    ),
    _row(
        REFUSED,
        "with model chunks or more than 2 stages; else beside stock by tests/megatron_lm/test_options.py",
        """
        iterations_to_skip result_rejected_tracker_filename
        """,
    ),
    _row(
        REFUSED,
        "with model chunks on two ranks, as by Megatron",
        """
        overlap_p2p_comm
        """,
    ),
    _row(
        REFUSED,
        "in a V placement; elsewhere inside attention",
        """
        experimental_attention_variant
        """,
    ),
    _row(
        REFUSED,
        "where weight gradients are split off, other values than local and transformer_engine",
        """
        transformer_impl
        """,
    ),
    _row(
        REFUSED,
        "where it does not fit the model chunks; else beside stock by tests/megatron_lm/test_heads.py",
        """
        hybrid_layer_pattern
        """,
    ),
    _row(
        REFUSED,
        "where they do not fit the model chunks; else run on 22 November 2026 with 0.16.1, four "
        "iterations beside stock on pp 2",
        """
        decoder_last_pipeline_num_layers account_for_embedding_in_pipeline_split
        account_for_loss_in_pipeline_split
        """,
    ),
    _row(
        REFUSED,
        "with a legacy checkpoint, or one of ModelOpt",
        """
        pretrained_checkpoint
        """,
    ),
    _row(
        REFUSED,
        "drops our flags",
        """
        yaml_cfg
        """,
    ),
    _row(
        NOT_RUN,
        "adam and sgd were run; others tell vocabulary weights by is_embedding_or_output_parameter, "
        "which ours bear",
        """
        optimizer muon_momentum muon_split_qkv muon_use_nesterov muon_scale_mode muon_fp32_matmul_prec
        muon_num_ns_steps muon_tp_mode muon_extra_scale_factor no_weight_decay_cond_type
        muon_coefficient_type muon_scalar_optimizer lion_beta1 lion_beta2 muon_nesterov muon_use_syrk
        """,
    ),
    _row(
        WORKS,
        "beside stock by tests/megatron_lm/test_transformer_engine.py, over a stand-in of the compiled part",
        """
        fp8 fp8_recipe first_last_layers_bf16 use_transformer_engine_op_fuser moe_grouped_gemm
        gradient_accumulation_fusion multi_latent_attention
        """,
    ),
    _row(
        REFUSED,
        "with several model chunks a rank and another recipe than tensorwise or blockwise; else beside stock "
        "by tests/megatron_lm/test_transformer_engine.py",
        """
        fp8_param_gather
        """,
    ),
    _row(
        NOT_RUN,
        "operands of 8 or 4 bits need a GPU; the vocabulary layers have none of them",
        """
        fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad
        num_layers_at_start_in_bf16 num_layers_at_end_in_bf16
        kitchen_config_file kitchen_recipe_number fp4 fp4_recipe fp4_param fp8_quantizer_factory
        fp4_quantizer_factory te_precision_config_file fp4_param_gather
        """,
    ),
    _row(
        NOT_RUN,
        "NCCL, its buffers and networks alone",
        """
        pipeline_model_parallel_comm_backend high_priority_stream_groups lazy_mpu_init nccl_ub use_sharp
        sharp_enabled_group nccl_communicator_config_path disable_symmetric_registration
        fake_process_group
        """,
    ),
    _row(
        NOT_RUN,
        "where main weights and moments are, and of what type; S, T and IB write main_grad all the same",
        """
        optimizer_cpu_offload optimizer_offload_fraction use_torch_optimizer_for_cpu_offload
        overlap_cpu_optimizer_d2h_h2d pin_cpu_grads pin_cpu_params use_precision_aware_optimizer
        main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype use_layer_wise_param_layout
        """,
    ),
    _row(
        NOT_RUN,
        "checkpoints of other kinds, or loaded by other rules",
        """
        load_main_params_from_ckpt non_persistent_save_interval non_persistent_ckpt_type
        non_persistent_global_ckpt_dir non_persistent_local_ckpt_dir non_persistent_local_ckpt_algo
        use_mp_args_from_checkpoint_args replication replication_jump replication_factor
        moe_use_upcycling moe_upcycling_granularity dist_ckpt_optim_fully_reshardable
        ckpt_drop_redundant_extra_state
        """,
    ),
    _row(
        NOT_RUN,
        "bits that do not depend on order or batch; --vocab-parallel-invariant is ours",
        """
        deterministic_mode disable_bf16_reduced_precision_matmul batch_invariant_mode
        batch_invariant_backend
        """,
    ),
    _row(
        NOT_RUN,
        "faults on purpose",
        """
        error_injection_rate error_injection_type fault_injector_ranks fault_injector_num_ranks
        fault_injector_fault_types fault_injector_fault_probabilities fault_injector_fault_delay
        fault_injector_delay_start_iteration fault_injector_mtti_seconds fault_injector_offset_seconds
        fault_injector_seed
        """,
    ),
    _row(
        REFUSED,
        "embedded tokens, and hidden states between stages, have the model's 16 bits",
        """
        fp32_residual_connection
        """,
    ),
    _row(
        REFUSED,
        "weights are drawn after the layers are made, which was never run with vocabulary shards",
        """
        init_model_with_meta_device
        """,
    ),
    _row(
        NOT_RUN,
        "activations of layers on the host; Megatron has it without a pipeline alone",
        """
        cpu_offloading_num_layers cpu_offloading_retain_pinned_cpu_buffers
        """,
    ),
    _row(
        NOT_RUN,
        "positions of images and text, which stages between do not get",
        """
        mrope_section
        """,
    ),
    _row(
        NOT_RUN,
        "heads on stages of their own, or by an older pattern",
        """
        mtp_standalone mtp_hybrid_override_pattern
        """,
    ),
    _row(
        NOT_RUN,
        "experts' choices kept for another pass",
        """
        moe_enable_routing_replay
        """,
    ),
    _row(
        NOT_RUN,
        "attention within documents of one row, from cu_seqlens as with --sft",
        """
        dataloader_inter_document_masking
        """,
    ),
    _row(
        NOT_RUN,
        "initial weights that were not drawn beside stock's",
        """
        init_method_xavier_uniform perform_initialization inference_rng_tracker
        """,
    ),
    _row(
        NOT_RUN,
        "of Mamba layers, which were not run: they need mamba-ssm",
        """
        mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads mamba_training_ssm_states_dtype
        hybrid_attention_ratio hybrid_mlp_ratio disable_mamba_mem_eff_path use_mamba_mem_eff_path
        """,
    ),
    _row(
        CANNOT_MATTER,
        "other names of --num-layers and --seq-length",
        """
        encoder_num_layers encoder_seq_length
        """,
    ),
    _row(
        CANNOT_MATTER,
        "read only with --use-megatron-fsdp or --use-torch-fsdp2, which are refused",
        """
        strict_fsdp_dtensor_load data_parallel_sharding_strategy gradient_reduce_div_fusion
        fsdp_double_buffer suggested_communication_unit_size keep_fp8_transpose_cache
        enable_full_sharding_in_hsdp torch_fsdp2_reshard_after_forward fsdp_manual_registration
        create_all_gather_group outer_dp_sharding_strategy megatron_fsdp_main_params_dtype
        megatron_fsdp_main_grads_dtype megatron_fsdp_grad_comm_dtype
        megatron_fsdp_enable_fine_grained_param_gather megatron_fsdp_max_pool_double_buffer
        fsdp_db_use_persist_buf_on_alloc_fail megatron_fsdp_version
        """,
    ),
    _row(
        CANNOT_MATTER,
        "read only with --inprocess-restart, which is refused",
        """
        inprocess_max_iterations inprocess_monitor_thread_interval inprocess_monitor_process_interval
        inprocess_progress_watchdog_interval inprocess_heartbeat_interval inprocess_soft_timeout
        inprocess_hard_timeout inprocess_heartbeat_timeout inprocess_barrier_timeout
        inprocess_completion_timeout inprocess_last_call_wait inprocess_termination_grace_time
        inprocess_granularity inprocess_active_world_size inprocess_empty_cuda_cache
        """,
    ),
    _row(
        CANNOT_MATTER,
        "read only with --logits-save-dir or --logits-load-dir, which are refused",
        """
        logits_save_top_k logits_save_top_p logits_save_top_p_min_k logits_save_dtype
        logits_load_decode_threads logits_load_prefetch_factor logits_load_msc_prefetch_depth
        logits_load_kd_loss_alpha logits_load_ignore_errors
        """,
    ),
    _row(
        CANNOT_MATTER,
        "read only with --perform-rl-step, which is refused",
        """
        rl_prompts_per_eval grpo_prompts_per_step grpo_group_size grpo_iterations grpo_clamp_eps_lower
        grpo_clamp_eps_upper grpo_kl_beta grpo_entropy_term_weight grpo_filter_groups_with_same_reward
        grpo_default_temperature grpo_default_top_p langrl_inference_server_type
        langrl_inference_server_conversation_template langrl_external_server langrl_env_config
        rl_offload_optimizer_during_inference rl_offload_kv_cache_during_training
        rl_remove_kv_cache_during_training rl_reset_cuda_graphs rl_partial_rollouts
        rl_inference_logprobs_is_correction rl_importance_sampling_truncation_coef
        rl_calculate_intra_group_similarity rl_use_sequence_packing rl_sequence_packing_bin_size
        rl_sequence_packing_algo rl_default_temperature rl_default_top_p rl_default_top_k
        rl_sequence_packing_max_sequences_per_bin rl_training_cuda_graphs
        rl_inference_tensor_model_parallel_size rl_inference_pipeline_model_parallel_size
        rl_inference_expert_model_parallel_size rl_inference_expert_tensor_model_parallel_size
        rl_inference_model_unified_memory_level rl_offload_inference_model_weights_when_idle
        refit_method rl_verify_model_weights_swap rl_parallel_generation_tasks rl_skip_bos_token
        rl_num_parallel_generations rl_num_parallel_generation_batches rl_generation_batch_size
        rl_kv_cache_management_mode rl_persist_cuda_graphs rl_inference_parsers rl_generation_lag
        rl_submission_granularity rl_consumption_granularity rl_profile rl_profile_dir
        rl_max_inflight_requests rl_durable_rollout_bank rl_rollout_bank_dir rl_rollout_bank_max_bytes
        """,
    ),
    _row(
        CANNOT_MATTER,
        "read only with --tensor-parallel-num-weight-shards, which is refused",
        """
        gtp_remat_opt_in_modules gtp_remat_reduce_scatter_with_fp32_accumulation gtp_remat_nccl_ub
        gtp_expert_remat_nccl_ub
        """,
    ),
    _row(
        CANNOT_MATTER,
        "read only with --enable-mhc-connections, which is refused",
        """
        mhc_num_residual_streams mhc_sinkhorn_iterations mhc_init_gating_factor mhc_recompute_layer_num
        """,
    ),
    _row(
        CANNOT_MATTER,
        "read only with --moe-paged-stash, --fine-grained-activation-offloading, "
        "--hybrid-context-parallel or --defer-embedding-wgrad-compute, which are refused",
        """
        wgrad_deferral_limit max_seqlen_per_dp_cp_rank offload_modules min_offloaded_tensor_size
        moe_paged_stash_page_size moe_paged_stash_buffer_size_factor_cuda
        moe_paged_stash_buffer_size_factor_cpu fine_grained_offloading_max_inflight_offloads
        delay_offload_until_cuda_graph delta_offload_bytes_across_pp_ranks activation_offload_fraction
        """,
    ),
    _row(
        CANNOT_MATTER,
        "read only with --overlap-moe-expert-parallel-comm or --delay-wgrad-compute, which are refused",
        """
        ep_overlap_early_attn_memory_release overlap_dispatch_backward_with_experts_wgrad
        high_priority_a2a_comm_stream
        """,
    ),
    _row(
        CANNOT_MATTER,
        "read only with graphs of layers, which go with one set of options",
        """
        cuda_graph_warmup_steps
        """,
    ),
    _row(
        CANNOT_MATTER,
        "of the legacy formats of checkpoints, which are refused",
        """
        use_dist_ckpt_deprecated dist_ckpt_format_deprecated ckpt_convert_save
        ckpt_convert_update_legacy_dist_opt_format load_model_opt_format
        """,
    ),
    _row(
        CANNOT_MATTER,
        "read by models and scripts without a language model's head: retrieval, images, RETRO, BERT's head",
        """
        decoder_num_layers relative_attention_num_buckets relative_attention_max_distance onnx_safe
        bert_binary_head decoder_seq_length retriever_seq_length sample_rate mask_prob short_seq_prob
        output_bert_embeddings bert_embedder_type ict_head_size biencoder_projection_dim
        biencoder_shared_query_context_model ict_load bert_load titles_data_path query_in_block_prob
        use_one_sent_docs evidence_data_path retriever_report_topk_accuracies retriever_score_scaling
        block_data_path embedding_path indexer_batch_size indexer_log_interval num_classes img_h img_w
        num_channels patch_dim classes_fraction data_per_class_fraction data_sharding head_lr_mult
        vision_pretraining vision_pretraining_type vision_backbone_type swin_backbone_type mask_type
        mask_factor iter_per_epoch dino_local_img_size dino_local_crops_number dino_head_hidden_size
        dino_bottleneck_size dino_freeze_last_layer dino_norm_last_layer dino_warmup_teacher_temp
        dino_teacher_temp dino_warmup_teacher_temp_epochs retro_project_dir retro_add_retriever
        retro_cyclic_train_iters retro_encoder_layers retro_encoder_hidden_dropout
        retro_encoder_attention_dropout retro_num_neighbors retro_num_retrieved_chunks
        retro_attention_gate retro_verify_neighbor_count
        """,
    ),
    _row(
        CANNOT_MATTER,
        "read by inference engines, outside the training loop",
        """
        cache_mla_latents flash_decode symmetric_ar_type nccl_all_reduce_for_prefill
        mlp_chunks_for_prefill moe_pad_experts_for_cuda_graph_inference inference_fuse_tp_communication
        inference_disable_triton_nvls_kernels inference_grouped_gemm_backend
        inference_moe_disable_fused_quant_kernels inference_cuda_graph_scope
        inference_moe_token_dispatcher_type inference_batch_times_seqlen_threshold max_tokens_to_oom
        inference_max_batch_size inference_max_seq_length inference_dynamic_batching
        inference_dynamic_batching_buffer_size_gb inference_dynamic_batching_chunk_size
        inference_dynamic_batching_buffer_guaranteed_fraction
        inference_dynamic_batching_buffer_overflow_factor
        inference_dynamic_batching_max_requests_override inference_dynamic_batching_max_tokens_override
        inference_dynamic_batching_num_cuda_graphs inference_dynamic_batching_block_size
        inference_dynamic_batching_track_paused_request_events decode_only_cuda_graphs
        inference_dynamic_batching_unified_memory_level disable_chunked_prefill use_legacy_static_engine
        inference_dynamic_batching_paused_buffer_size_gb inference_dynamic_batching_max_requests
        inference_dynamic_batching_max_tokens inference_dynamic_batching_cuda_graph_max_tokens
        inference_dynamic_batching_cuda_graph_mixed_prefill_count inference_logging_step_interval
        inference_wandb_logging inference_coordinator_port inference_max_requests
        inference_dynamic_batching_mamba_memory_ratio
        inference_dynamic_batching_track_generated_token_events enable_chunked_prefill
        num_speculative_tokens inference_dynamic_batching_enable_prefix_caching
        inference_dynamic_batching_prefix_caching_eviction_policy
        inference_dynamic_batching_prefix_caching_coordinator_policy
        inference_dynamic_batching_prefix_caching_routing_alpha
        inference_dynamic_batching_prefix_caching_mamba_gb inference_text_gen_server_logging
        mamba_inference_conv_states_dtype mamba_inference_ssm_states_dtype
        inference_use_synchronous_zmq_collectives inference_cuda_graph_all_prefills
        inference_dynamic_batching_sampling_backend inference_disable_ep_consensus
        inference_cuda_graph_max_tokens inference_dynamic_batching_cuda_graph_sizing_distribution
        offset_sampling_seed_by_dp_rank inference_dynamic_batching_async_sched_mode
        inference_dynamic_batching_logprobs_mode inference_shards
        """,
    ),
    _row(
        CANNOT_MATTER,
        "what is written to logs, and when",
        """
        moe_per_layer_logging config_logger_dir dump_param_to_param_group_map enable_one_logger
        one_logger_project one_logger_run_name one_logger_async app_tag_run_name app_tag_run_version
        otel_enabled otel_service_name otel_span_groups
        """,
    ),
    _row(
        CANNOT_MATTER,
        "when a process times, watches, profiles, pauses or ends",
        """
        empty_unused_memory_level exit_duration_in_mins exit_signal_handler manual_gc manual_gc_interval
        manual_gc_eval distributed_timeout_minutes adlr_autoresume adlr_autoresume_interval enable_msc
        distributed_timeout_seconds_after_init exit_signal exit_signal_handler_for_dataloader
        exit_signal_handler_for_training flight_recorder_dump_path flight_recorder_trace_buffer_size
        flight_recorder_dump_on_timeout flight_recorder_include_stack_trace
        flight_recorder_include_only_active flight_recorder_extra_dump_on_exec gpu_sniff_test_interval
        disable_msc_deprecated profile profile_step_start profile_step_end use_pytorch_profiler
        profile_ranks record_memory_history memory_snapshot_path log_straggler
        disable_straggler_on_startup straggler_ctrlr_port straggler_minmax_count
        run_workload_inspector_server enable_ft_package calc_ft_timeouts ft_num_warmup_iters
        pytorch_profiler_collect_shapes pytorch_profiler_collect_callstack
        pytorch_profiler_collect_chakra record_shapes nvtx_ranges
        """,
    ),
    _row(
        CANNOT_MATTER,
        "which text is read and how; tokens, labels and masks come through forward_step as ever",
        """
        data_path split train_data_path valid_data_path test_data_path data_args_path
        per_split_data_args_path data_cache_path mmap_bin_files mock_data num_dataset_builder_threads
        object_storage_cache_path mid_level_dataset_surplus sft_tokenizer_prompt_format
        phase_transition_iterations per_dataset_sequences_path dataloader_fast_cache_load
        dataloader_defer_npy_index_mmap allow_ambiguous_pad_tokens fim_data fim_rate fim_spm_rate
        fim_split_sample fim_fragment_rate fim_no_prefix fim_prefix_token fim_middle_token
        fim_suffix_token fim_pad_token fim_eod_token
        """,
    ),
    _row(
        CANNOT_MATTER,
        "which ids text becomes; how many there are is asked of the tokenizer",
        """
        vocab_file merge_file vocab_extra_ids tokenizer_type tokenizer_model tiktoken_pattern
        tiktoken_num_special_tokens tiktoken_special_tokens tokenizer_metadata legacy_tokenizer
        trust_remote_code tokenizer_special_tokens tokenizer_sentencepiece_legacy tokenizer_hf_use_fast
        tokenizer_hf_include_special_tokens tokenizer_hf_no_use_fast
        tokenizer_hf_no_include_special_tokens metadata_path special_tokens
        tokenizer_sentencepiece_ignore_extra_whitespaces null_tokenizer_eod_id null_tokenizer_pad_id
        chat_template use_gigatoken
        """,
    ),
    _row(
        CANNOT_MATTER,
        "a number of the optimizer or its schedule, used when gradients are final",
        """
        start_weight_decay end_weight_decay weight_decay_incr_style sgd_momentum lr_wsd_decay_style
        lr_decay_iters lr_decay_samples lr_wsd_decay_samples lr_wsd_decay_iters lr_warmup_fraction
        lr_warmup_samples lr_warmup_init warmup override_opt_param_scheduler
        use_checkpoint_opt_param_scheduler loss_scale min_loss_scale loss_scale_window hysteresis
        apply_wd_to_qk_layernorm
        """,
    ),
    _row(
        CANNOT_MATTER,
        "of Megatron's own schedule, which ours replaces",
        """
        microbatch_group_size_per_vp_stage overlap_p2p_comm_warmup_flush
        scatter_gather_tensors_in_pipeline use_ring_exchange_p2p
        """,
    ),
    _row(
        CANNOT_MATTER,
        "accepted without effect: there is no separate loss kernel to fuse",
        """
        cross_entropy_loss_fusion cross_entropy_fusion_impl
        """,
    ),
    _row(
        CANNOT_MATTER,
        "deprecated, set by the launcher, or said by the pattern of layers",
        """
        batch_size deprecated_use_mcore_models tp_comm_split_ag tp_comm_split_rs model_parallel_size
        local_rank moe_extended_tp is_hybrid_model
        """,
    ),
    _row(
        CANNOT_MATTER,
        "how many padding ids stock has; here padding is masked, and a line says by how many",
        """
        padded_vocab_size pad_vocab_size
        """,
    ),
    _row(
        CANNOT_MATTER,
        "inside a transformer layer, which F and B call as Megatron's schedule does",
        """
        ffn_hidden_size attention_backend rotary_base rotary_percent rotary_interleaved
        rotary_seq_len_interpolation_factor rope_scaling_factor no_rope_freq norm_epsilon
        apply_layernorm_1p apply_residual_connection_post_layernorm openai_gelu squared_relu
        masked_softmax_fusion bias_gelu_fusion bias_swiglu_fusion
        use_fused_weighted_squared_relu bias_dropout_fusion apply_rope_fusion rope_type use_flash_attn
        add_qkv_bias async_tensor_model_parallel_allreduce no_persist_layer_norm
        apply_query_key_layer_scaling attention_softmax_in_fp32 cp_comm_type
        hierarchical_context_parallel_sizes qk_layernorm qk_l2_norm expert_tensor_parallel_size
        moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_shared_expert_overlap
        moe_use_legacy_grouped_gemm moe_router_load_balancing_type moe_router_dtype
        moe_router_fusion moe_router_pre_softmax moe_router_num_groups moe_router_group_topk
        moe_router_topk_scaling_factor moe_router_force_load_balancing moe_router_padding_for_fp8
        moe_input_jitter_eps moe_enable_deepep moe_deepep_num_sms moe_permute_fusion
        moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_token_drop_policy
        moe_apply_probs_on_input softmax_type window_size window_attn_skip_freq quick_geglu
        activation_func_clamp_value glu_linear_offset use_te_activation_func layernorm_epsilon
        layernorm_zero_centered_gamma qk_clip qk_clip_alpha qk_clip_threshold attention_output_gate
        dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_loss_coeff
        dsa_indexer_use_sparse_loss linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim
        linear_num_key_heads linear_num_value_heads use_kitchen_attention kitchen_attention_backend
        moe_shared_expert_gate moe_router_padding_for_quantization moe_flex_dispatcher_backend
        moe_latent_size moe_hybridep_num_sms linear_attention_freq log_max_attention_logit
        mup_width_mult mup_base_head_dim mup_attn_scale_power fused_residual_rmsnorm
        moe_router_force_biased moe_permute_fusion_into_hybridep moe_hybridep_num_blocks_permute
        moe_hybridep_num_blocks_unpermute use_grouped_gemm_for_dense_mlp moe_single_grouped_weight
        moe_single_grouped_bias moe_hybridep_num_sms_preprocessing moe_mlp_glu_interleave_size
        moe_expert_rank_capacity_factor mlp_chunks_for_training save_tokens_per_expert_interval
        flash_attention_version dsa_indexer_topk_freq dsa_indexer_skip_topk_offset dsa_kernel_backend
        dsa_indexer_rope_interleaved dsa_indexer_rotate_activation dsa_indexer_scoring_relu
        dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32 use_grouped_gemm_for_shared_expert
        moe_shared_expert_glu_interleave_size moe_router_quantile_balancing_ema
        moe_hybridep_pad_uneven_dispatch_inputs moe_flex_dispatcher_num_sms moe_ncclep_static_shape
        moe_ncclep_zero_copy yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow
        yarn_correction_range_round_to_int moe_routing_trace_path moe_routing_trace_max_training_iters
        moe_routing_trace_capture_logits moe_routing_trace_capture_hidden_states
        moe_routing_trace_dump_weights moe_use_grouped_tensor moe_dispatch_fwd_dtype
        moe_combine_bwd_dtype gdp_num_householder gdp_cutedsl_kernel gdp_num_chunk_states_to_recompute
        q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rotary_scaling_factor mscale
        mscale_all_dim mla_down_proj_fusion
        """,
    ),
    _row(
        CANNOT_MATTER,
        "what a layer keeps for its backward pass, which B calls as Megatron's schedule does",
        """
        recompute_activations distribute_saved_activations recompute_modules checkpoint_activations
        moe_layer_recompute
        """,
    ),
    _row(
        CANNOT_MATTER,
        "in tensor-parallel linear layers of Transformer Engine; the vocabulary layers are none of them",
        """
        tp_comm_overlap tp_comm_overlap_cfg tp_comm_overlap_ag tp_comm_overlap_rs
        tp_comm_overlap_rs_dgrad tp_comm_bulk_dgrad tp_comm_bulk_wgrad tp_comm_bootstrap_backend
        """,
    ),
    _row(
        CANNOT_MATTER,
        "rows reach the first stage scattered already: IF and IB are ours",
        """
        clone_scatter_output_in_embedding
        """,
    ),
    _row(
        CANNOT_MATTER,
        "what is written to logs, and when; of losses and norms that training has anyway",
        """
        log_interval tensorboard_dir log_throughput log_progress timing_log_level log_energy
        barrier_with_L1_time timing_log_option tensorboard_log_interval tensorboard_queue_size
        log_timers_to_tensorboard log_loss_scale_to_tensorboard log_validation_ppl_to_tensorboard
        log_memory_to_tensorboard log_world_size_to_tensorboard wandb_project wandb_exp_name
        wandb_save_dir logging_level wandb_entity log_memory_interval log_device_memory_used
        """,
    ),
    _row(
        CANNOT_MATTER,
        "how files of a sharded state dict are written, read, kept and named; ours hands Megatron one "
        "as stock's does",
        """
        save_retain_interval use_tokenizer_model_from_checkpoint_args exit_on_missing_checkpoint
        use_persistent_ckpt_worker ckpt_fully_parallel_save_deprecated dist_ckpt_save_pre_mcore_014
        distrib_optim_fully_reshardable_mem_efficient async_strategy async_ckpt_cpu_priority
        async_ckpt_io_priority ckpt_fully_parallel_load_exchange_algo
        ckpt_fully_parallel_save_process_group ckpt_fully_parallel_load_process_group verify_integrity
        dist_ckpt_workers async_ckpt_use_cpu_shm ckpt_load_validate_sharding_integrity
        stream_ckpt_dequant override_ckpt_iteration ckpt_fully_parallel_load_per_rank_objects
        ckpt_pg_tensors_cache_path ckpt_pg_tensors_cache_create save_tokenizer_assets
        """,
    ),
    _row(
        CANNOT_MATTER,
        "how many microbatches an iteration has; any number will do",
        """
        decrease_batch_size_if_needed step_batch_size_schedule
        """,
    ),
    _row(
        CANNOT_MATTER,
        "which batches are evaluated, and when",
        """
        full_validation multiple_validation_sets test_mode validation_set_names
        """,
    ),
    _row(
        CANNOT_MATTER,
        "switches on names that other options stand for",
        """
        enable_experimental
        """,
    ),
)

ROW_OF: Mapping[str, Row] = {name: row for row in ROWS for name in row.options}
"""The row of each option."""
