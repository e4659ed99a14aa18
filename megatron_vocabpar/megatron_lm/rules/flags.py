"""``FLAGS``: single flags of Megatron that are refused or warned of; ``docs/megatron.md`` has the table.

Standard library only.
"""

from __future__ import annotations

from megatron_vocabpar.pipeline.rules.rule import UNTESTED, Rule, alone

FLAGS = (
    alone("use_legacy_models", "only megatron-core's GPTModel is partitioned"),
    alone("use_megatron_fsdp use_custom_fsdp use_torch_fsdp2",
        "S/T passes write main_grad of DistributedDataParallel", "use --use-distributed-optimizer instead"),
    alone("optimizer_cuda_graph",
        "a graph of the optimizer has not been run with gradients of vocabulary shards", level=UNTESTED),
    alone("overlap_dispatch_backward_with_experts_wgrad",
        "the experts' weight gradients in their exchange have not been run", level=UNTESTED),
    alone("fp16_lm_cross_entropy", "logits and loss are float32 here, in blocks that stay small"),
    Rule("--output-logit-dtype other than fp32", lambda f: f.logit_dtype != "fp32",
        "logits are float32 here"),
    alone("fp8_output_proj", "it is a layer of Transformer Engine",
        "use --vocab-parallel-fp8-head, which needs no other flag"),
    alone("fine_grained_activation_offloading", "Megatron's own schedule counts its buffers"),
    alone("moe_paged_stash", "Megatron's own schedule resets its pages"),
    alone("hybrid_context_parallel", "it has a schedule of its own", "use --context-parallel-size alone"),
    Rule("--ckpt-format other than torch_dist",
        lambda f: f.ckpt_format != "torch_dist" and not f.use_dist_ckpt and (f.save or f.load),
        "vocabulary shards need the distributed format", "use --ckpt-format torch_dist"),
    Rule("--ckpt-convert-format torch", lambda f: f.ckpt_convert_format != "torch_dist",
        "a legacy checkpoint would get the vocabulary rows of one rank",
        "save as torch_dist, then convert that without --enable-vocab-parallel"),
    alone("auto_detect_ckpt_format", "a legacy checkpoint holds the layers of single stages",
        "convert it to torch_dist and leave this out"),
    Rule("--rerun-mode report_stats", lambda f: f.rerun_mode not in ("disabled", "validate_results"),
        "what it reports has not been compared with stock's", "use disabled", UNTESTED),
    alone("check_for_spiky_loss", "its statistics have not been compared with stock's", level=UNTESTED),
    alone("inprocess_restart", "the vocabulary groups cannot be rebuilt in a running process"),
    Rule("--reuse-grad-buf-for-mxfp8-param-ag with --overlap-param-gather, with Megatron before 0.19",
        lambda f: f.reuse_grad_buf_for_mxfp8_param_ag and f.overlap_param_gather and not f.since_0_19,
        "gradients share a buffer with gathered parameters, which has been run with 0.19 alone",
        "leave out the one or the other", UNTESTED),
    alone("tensor_parallel_num_weight_shards expert_tensor_parallel_num_weight_shards",
        "vocabulary shards are divided among pipeline and tensor ranks alone", "leave them out"),
    alone("fp32_residual_connection",
        "embedded tokens, and hidden states between stages, have the model's 16 bits here"),
    alone("init_model_with_meta_device",
        "vocabulary shards are drawn and handed out when the layers are made"),
    alone("enable_mhc_connections enable_hyper_connections",
        "stages here send one residual stream to each other"),
    alone("config_logger_dir", "it writes the logits of every forward, which no rank holds"),
    alone("save_dgrads_interval save_activations_interval",
        "they hook the calls of linear layers, which S, T and IB do not make as stock does",
        "leave them out"),
    alone("modelopt_enabled export_kd_teacher_load",
        "ModelOpt puts a model and losses of its own in place, which see logits", "leave them out"),
    alone("logits_load_dir logits_save_dir", "Megatron's classes for them read logits, which no rank holds",
        "leave them out; a call of ForwardBackward takes teacher and keep_top (docs/reinforcement.md)"),
    alone("perform_rl_step", "it needs logits, which no rank holds"),
)  # fmt: skip
