"""Launch lines as Megatron parses them, with the rule that each breaks, or with none."""

from __future__ import annotations

from typing import Any

from megatron_vocabpar.pipeline.options import VocabOptions

FLAGS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"use_legacy_models": True}, "GPTModel is partitioned; leave it out"),
    ({"use_megatron_fsdp": True}, "use --use-distributed-optimizer instead"),
    ({"use_custom_fsdp": True}, "use --use-distributed-optimizer instead"),
    ({"use_torch_fsdp2": True}, "use --use-distributed-optimizer instead"),
    ({"cuda_graph_impl": "full_iteration"}, "leave it out, or capture single layers"),
    ({"external_cuda_graph": True}, "use --enable-cuda-graph"),
    ({"cuda_graph_impl": "local", "cuda_graph_scope": []}, "gave wrong gradients"),
    ({"cuda_graph_impl": "local", "mtp_detach_heads": False}, "gave wrong gradients"),
    ({"optimizer_cuda_graph": True}, "leave it out"),
    ({"overlap_dispatch_backward_with_experts_wgrad": True}, "leave it out"),
    ({"fp16_lm_cross_entropy": True}, "leave it out"),
    ({"logit_dtype": "bf16"}, "logits are float32 here; leave it out"),
    ({"fp8_output_proj": True}, "use --vocab-parallel-fp8-head, which"),
    ({"fine_grained_activation_offloading": True}, "counts its buffers; leave it out"),
    ({"moe_paged_stash": True}, "resets its pages; leave it out"),
    ({"hybrid_context_parallel": True}, "use --context-parallel-size alone"),
    ({"ckpt_format": "torch", "save": "checkpoints"}, "use --ckpt-format torch_dist"),
    ({"ckpt_format": "torch", "load": "checkpoints"}, "use --ckpt-format torch_dist"),
    ({"ckpt_convert_format": "torch"}, "then convert that without --enable-vocab-parallel"),
    ({"auto_detect_ckpt_format": True}, "convert it to torch_dist and leave this out"),
    ({"rerun_mode": "report_stats"}, "use disabled"),
    ({"check_for_spiky_loss": True}, "leave it out"),
    ({"inprocess_restart": True}, "cannot be rebuilt in a running process; leave it out"),
    ({"reuse_grad_buf_for_mxfp8_param_ag": True, "overlap_param_gather": True}, "leave out the one or the"),
    ({"tensor_parallel_num_weight_shards": 4}, "leave them out"),
    ({"expert_tensor_parallel_num_weight_shards": 2}, "leave them out"),
    ({"fp32_residual_connection": True}, "leave it out"),
    ({"init_model_with_meta_device": True}, "leave it out"),
    ({"enable_mhc_connections": True}, "leave it out"),
    ({"enable_hyper_connections": True}, "leave it out"),
    ({"config_logger_dir": "configurations"}, "leave it out"),
    ({"save_dgrads_interval": 10}, "leave them out"),
    ({"save_activations_interval": 10}, "leave them out"),
    ({"export_kd_teacher_load": "teacher"}, "leave them out"),
    ({"modelopt_enabled": True}, "leave them out"),
    ({"logits_load_dir": "teacher"}, "--logits-load-dir, --logits-save-dir: .* leave them out; a call"),
    ({"logits_save_dir": "teacher"}, "leave them out"),
    ({"perform_rl_step": True}, "leave it out"),
    ({"delay_wgrad_compute": True}, "--delay-wgrad-compute: .* use dualpipev or 1f1b-overlap, or leave it"),
)
"""Settings that are refused or warned of in 1F1B, and what to do."""

LOCAL_GRAPHS = {"cuda_graph_impl": "local", "cuda_graph_scope": "full"}
SCOPES = ["attn", "moe_router", "moe_preprocess"]
ENGINE_GRAPHS = {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": SCOPES, "num_experts": 8}
CAPTURED: dict[str, Any] = {"profile_iterations": 0}

LOCAL = {"transformer_impl": "local"}
TWO = LOCAL | {"num_virtual_stages_per_pipeline_rank": 2}
TWO_RANKS = TWO | {"pipeline_model_parallel_size": 2}
TE = {"transformer_impl": "transformer_engine"}
SEPARATE_HEADS = {"mtp_num_layers": 1, "pipeline_model_parallel_layout": "Et|t|tm|L"}
SEPARATE_IN_CHUNKS = SEPARATE_HEADS | {"pipeline_model_parallel_layout": "Et|t|t|t|t|t|tm|L"}
DOCUMENTS = {"dataloader_inter_document_masking": True}
FORMER = {"hybrid_layer_pattern": None, "transformer_impl": "local", "pipeline_model_parallel_size": 2}
"""Beside ``--hybrid-override-pattern``, in versions that have both names."""
PAIRED = TWO | {
    "num_layers": 16,
    "bf16": True,
    "num_experts": 8,
    "expert_model_parallel_size": 2,
    "moe_token_dispatcher_type": "alltoall",
    "overlap_moe_expert_parallel_comm": True,
}
PAIR_FAMILIES = ("dualpipev", "1f1b-overlap")
IN_PAIRS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"bf16": False}, "model of 16 bits for it; give --bf16 or --fp16"),
    ({"expert_model_parallel_size": 1}, "--expert-model-parallel-size of at least 2, or leave it out"),
    ({"num_experts": None}, "there is no exchange to hide; give --num-experts"),
    ({"moe_token_dispatcher_type": "allgather"}, "give --moe-token-dispatcher-type alltoall or flex"),
    ({"recompute_granularity": "full"}, "use --recompute-granularity selective"),
    ({"recompute_num_layers": 1}, "use --recompute-granularity selective"),
    ({"recompute_granularity": "selective", "recompute_modules": ["moe"]}, "leave moe out of"),
    ({"moe_shared_expert_overlap": True}, "as --moe-shared-expert-overlap; leave out the one"),
    ({"mtp_num_layers": 2}, "use --mtp-num-layers 1"),
    ({"mtp_num_layers": 1, "moe_layer_freq": [1] * 15 + [0]}, "give the last layer of --moe-layer-freq"),
    ({"mtp_num_layers": 1, "moe_layer_freq": 2}, "give the last layer of --moe-layer-freq"),
    (SEPARATE_IN_CHUNKS, "before the last stage have not been run in pairs; write m into the"),
    ({"hybrid_layer_pattern": "|".join(["*E"] * 8)}, "use pretrain_gpt.py, or leave it out"),
    (LOCAL_GRAPHS, "transformer_engine alone have been run in pairs; use that"),
    ({"cuda_graph_impl": "transformer_engine", "fp4": "e2m1"}, "leave out --cuda-graph-impl or --fp4"),
    ({"cpu_offloading_num_layers": 1}, "leave out --cpu-offloading-num-layers"),
    ({"delay_wgrad_compute": True}, "--delay-wgrad-compute: .* give --transformer-impl transformer_engine"),
    (
        TE | {"delay_wgrad_compute": True, "moe_use_legacy_grouped_gemm": True},
        "leave out --moe-use-legacy-grouped-gemm",
    ),
    (
        {"overlap_moe_expert_parallel_comm": False},
        "its pairs hide .* give --overlap-moe-expert-parallel-comm, or use (v-zb|interleaved), which",
    ),
)
UNTIED = {"untie_embeddings_and_output_weights": True, "bf16": True}
FP32 = VocabOptions(fp32_head=True)
FP8 = VocabOptions(fp8_head=True)
REDIS: dict[str, Any] = {"method": "redis", "redistribute": True, "final_stage_layers": 1}

OF_A_FAMILY: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("interleaved", {}, "interleaved: needs 2 model chunks per rank, not 1; give --num-virtual-stages"),
    (
        "v-half",
        {"num_virtual_stages_per_pipeline_rank": 3},
        r"needs 2 .* not 3; .* one of interleaved, 1f1b-overlap\n",
    ),
    ("1f1b", TWO, "1f1b: needs 1 model chunks per rank, not 2; .* interleaved, v-half, v-min, v-zb"),
    ("zb-h1", TWO, "zb-h1: needs 1 model chunks per rank, not 2"),
    (
        "search",
        TWO | {"pipeline_model_parallel_size": 1},
        "give --pipeline-model-parallel-size of at least 2",
    ),
    ("interleaved", TWO | {"pipeline_model_parallel_size": 1}, "model-parallel-size of at least 2"),
    ("interleaved", {"pipeline_model_parallel_layout": "Et|t|tL"}, "they give 3/4 model chunks on each"),
    ("1f1b", {"hybrid_layer_pattern": "*-|*-|*-/*-"}, "they give 3/4 model chunks on each"),
    (
        "auto",
        {"hybrid_layer_pattern": "*-*-", "num_layers_per_virtual_pipeline_stage": 1},
        "they give 0 model chunks on each",
    ),
    (
        "interleaved",
        {
            "num_layers": 80,
            "pipeline_model_parallel_size": 3,
            "num_layers_per_virtual_pipeline_stage": 1,
        },
        "they give 80/3 model chunks on each of 3 ranks",
    ),
    (
        "1f1b",
        {"num_layers": 6},
        "--num-layers 6: 6 layers do not divide into 1 model chunks on each of 4",
    ),
    ("v-zb", TWO | {"num_layers": 12}, "12 layers do not divide into 2 model chunks on each of 4 ranks"),
    ("v-zb", TWO | {"num_layers": 8, "decoder_first_pipeline_num_layers": 1}, "7 layers do not divide"),
    (
        "1f1b",
        {"num_layers": 8, "pipeline_model_parallel_size": 1, "decoder_last_pipeline_num_layers": 3},
        "--num-layers 8 with --decoder-last-pipeline-num-layers: 5 layers are left, and no rank for them; le",
    ),
    (
        "v-zb",
        TWO | {"num_layers": 8, "pipeline_model_parallel_size": 1, "decoder_first_pipeline_num_layers": 2},
        "with --decoder-first-pipeline-num-layers: 6 layers are left, and no rank for them; leave out -",
    ),
    (
        "1f1b",
        {"num_layers": 8, "decoder_last_pipeline_num_layers": 8},
        "no layer is left for 3 ranks; leave out --decoder-last-pipeline-num-layers",
    ),
    (
        "1f1b",
        {
            "num_layers": 8,
            "pipeline_model_parallel_size": 1,
            **{f"decoder_{end}_pipeline_num_layers": 4 for end in ("first", "last")},
        },
        "-pipeline-num-layers: there are not as many layers or ranks; leave out --decoder-first-",
    ),
    ("v-half", TWO | {"num_layers": 16, "decoder_first_pipeline_num_layers": 1}, "15 layers do not divide"),
    (
        "v-min",
        TWO | {"pipeline_model_parallel_size": 2, "overlap_p2p_comm": False},
        "--no-overlap-p2p-communication: Megatron refuses it",
    ),
    (
        "v-half",
        FORMER | {"hybrid_layer_pattern": "*-*-"},
        r"needs 2 model chunks per rank, not 1; write 3 \| into --hybrid-layer-pattern, or use one of",
    ),
    ("1f1b", FORMER | {"hybrid_override_pattern": "*-|*-|*-|*-"}, r"not 2; write 1 \| into --hybrid-lay"),
    (
        "v-zb",
        {"pipeline_model_parallel_layout": "Et|t|t|tL"},
        r"not 1; write 7 \| into --pipeline-model-",
    ),
    (
        "v-half",
        {"num_layers": 8, "pipeline_model_parallel_layout": "Et|t|t|t|t|t|tL"},
        r"-layout Et\|t\|t\|t\|t\|t\|tL: in order it has E t\*7 L, but .* give E t\*8 L; write these",
    ),
    ("1f1b", {"num_layers": 3, "pipeline_model_parallel_layout": ""}, "in order it has nothing, but"),
    ("1f1b", {"num_layers": 3, "pipeline_model_parallel_layout": "E(t|t|t|L"}, r"has E \( t\*3 L, but"),
    (
        "interleaved",
        {"mtp_num_layers": 1, "pipeline_model_parallel_layout": "Et|t|tm|||||L"},
        "m in .* all m together, in the last model chunk of a rank; write them into one of the last 4 st",
    ),
    (
        "v-half",
        TWO | SEPARATE_IN_CHUNKS,
        "m before the last stage of .* v-half has .* zb-h1 or interleaved, or write m into the stage of L",
    ),
    ("1f1b", DOCUMENTS, "--dataloader-inter-document-masking: all stages .* use 2 stages of one"),
    ("v-half", TWO_RANKS | DOCUMENTS, "--dataloader-inter-document-masking: all stages"),
    (
        "interleaved",
        TWO_RANKS | {"iterations_to_skip": [3, 4]},
        r"--iterations-to-skip.*\(3 4\): .* on 2 st",
    ),
    (
        "1f1b",
        {"iterations_to_skip": [3]},
        r"--iterations-to-skip.*\(3\): .* use 1f1b or zb-h1 on 2 stages at",
    ),
    (
        "1f1b",
        {"result_rejected_tracker_filename": "a"},
        r"-rejected-tracker-filename \(a\): Megatron skips",
    ),
    (
        "v-half",
        TWO | {"heterogeneous_layers_config_path": "a.json"},
        "-config-path: .* use 1f1b or zb-h1",
    ),
    ("v-half", TWO | {"heterogeneous_layers_config_encoded_json": "{}"}, "one model chunk a rank alone;"),
    ("zb-h1", {"transformer_impl": "inference_optimized"}, "zb-h1 splits weight gradients .* local"),
    ("zb-h1", TE | {"tp_comm_overlap": True}, "--tp-comm-overlap: .* --disable-tp-comm-bulk-wgrad"),
)
FITS_A_FAMILY: tuple[tuple[str, dict[str, Any]], ...] = (
    ("interleaved", {"num_virtual_stages_per_pipeline_rank": 2}),
    ("interleaved", {"num_layers_per_virtual_pipeline_stage": 1, "num_layers": 8}),
    ("interleaved", {"pipeline_model_parallel_layout": "Et|t|t|t|t|t|t|tL"}),
    ("1f1b", {"num_layers": 7, "decoder_first_pipeline_num_layers": 1}),
    ("1f1b", {"hybrid_layer_pattern": "*-|*-|M-|*E/*-/*-"}),
    ("1f1b", {"hybrid_layer_pattern": "*-*-*-*-", "num_layers": 8}),
    ("v-half", {"hybrid_layer_pattern": "*|-|*|-|*|-|*|-/*-", "transformer_impl": "local"}),
    ("v-half", LOCAL | {"mtp_num_layers": 1, "pipeline_model_parallel_layout": "Et|t|t|t|t|t|t|tmL"}),
    ("1f1b", SEPARATE_HEADS),
    ("interleaved", SEPARATE_IN_CHUNKS),
    ("zb-h1", {"transformer_impl": "local"}),
    ("zb-h1", TE),
    ("v-half", TWO | {"num_layers": 16}),
    ("v-half", FORMER | {"hybrid_override_pattern": "*-|*-|*-|*-/*-"}),
    ("v-half", TWO | {"reset_attention_mask": True, "create_attention_mask_in_dataloader": True}),
    ("v-half", TWO | {"experimental_attention_variant": "dsa"}),
    ("1f1b", DOCUMENTS | {"pipeline_model_parallel_size": 2}),
    ("v-half", TWO | DOCUMENTS | {"sft": True}),
    ("1f1b", {"heterogeneous_layers_config_path": "a.json"}),
    ("1f1b", {"iterations_to_skip": [3], "pipeline_model_parallel_size": 2}),
    ("1f1b", {"iterations_to_skip": [3], "sft": True}),
    ("interleaved", TWO | {"iterations_to_skip": []}),
    ("search", TWO),
)

REFUSED: tuple[tuple[dict[str, Any], dict[str, Any], str], ...] = (
    # CUDA graphs of layers
    (
        LOCAL_GRAPHS,
        CAPTURED | {"family": "zb-h1"},
        "layers with --vocab-parallel-family zb-h1: a graph of B holds",
    ),
    (LOCAL_GRAPHS, {"profile_iterations": 3}, "give --vocab-parallel-profile-iterations 0"),
    (LOCAL_GRAPHS | {"hidden_dropout": 0.1}, CAPTURED, "with --hidden-dropout other than 0:"),
    (
        LOCAL_GRAPHS | {"num_experts": 8, "fp4": "e2m1"},
        CAPTURED,
        "with --num-experts, --fp4-format: they have not been",
    ),
    (
        LOCAL_GRAPHS | {"pipeline_model_parallel_size": 1},
        CAPTURED,
        "with --pipeline-model-parallel-size 1:",
    ),
    (
        LOCAL_GRAPHS | {"cuda_graph_scope_deprecated": ["full_iteration"]},
        CAPTURED,
        "leave it out, or capture single layers",
    ),
    (LOCAL_GRAPHS | {"cuda_graph_scope": "attn"}, CAPTURED, "with --cuda-graph-scope:"),
    (LOCAL_GRAPHS | {"recompute_granularity": "full"}, CAPTURED, "with --recompute-granularity: they have"),
    (ENGINE_GRAPHS, CAPTURED | {"family": "v-half"}, "v-half: a graph of B holds the weight gradients"),
    (
        ENGINE_GRAPHS | PAIRED,
        CAPTURED | {"family": "dualpipev"},
        "dualpipev: a graph .* use 1f1b, interleaved or 1f1b-overlap",
    ),
    (ENGINE_GRAPHS, {"profile_iterations": 3}, "give --vocab-parallel-profile-iterations 0"),
    (
        ENGINE_GRAPHS | {"pipeline_model_parallel_size": 1},
        CAPTURED,
        "with --pipeline-model-parallel-size 1:",
    ),
    (LOCAL_GRAPHS | {"hybrid_layer_pattern": "M*"}, CAPTURED, "with --hybrid-layer-pattern:"),
    (
        ENGINE_GRAPHS | {"cuda_graph_warmup_steps": 0},
        CAPTURED,
        "--cuda-graph-warmup-steps 0: .* give 1 or more",
    ),
    (ENGINE_GRAPHS | {"rampup_batch_size": ["4", "4", "64"]}, CAPTURED, "with --rampup-batch-size:"),
    (
        ENGINE_GRAPHS | {"step_batch_size_schedule": "0:4 9:8"},
        CAPTURED,
        "with --step-batch-size-schedule:",
    ),
    *((settings, {"family": family}, message) for family, settings, message in OF_A_FAMILY),
    (
        LOCAL | {"pipeline_model_parallel_layout": "Ettt|t|t|||t|t|tL"},
        {"family": "v-zb", "method": "baseline"},
        "Ettt.t.t...t.t.tL: rank 3 has no layer",
    ),
    *(
        (
            TWO | heads,
            {"family": "v-half", "method": "baseline"},
            message,
        )
        for heads, message in (
            ({"hybrid_layer_pattern": "*|*|*|*|*|*|*|*/*"}, "whole .* v-half have labels"),
            ({"mtp_num_layers": 1, "mtp_detach_heads": True}, "--mtp-detach-heads: .* computes the losses"),
            ({"mtp_num_layers": 1, "position_embedding_type": "learned_absolute"}, "a copy of its own"),
        )
    ),
    (
        TWO_RANKS | {"defer_embedding_wgrad_compute": True},
        {"family": "interleaved", "method": "baseline"},
        "--defer-embedding-wgrad-compute: Megatron's own schedule",
    ),
    (
        TWO | {"variable_seq_lengths": True},
        {"family": "v-half", "method": "baseline"},
        "variable_seq_lengths: .* use a method that partitions the vocabulary",
    ),
    (
        TE | {"overlap_dispatch_backward_with_experts_wgrad": True},
        {"family": "zb-h1"},
        "weight gradients that --vocab-parallel-family zb-h1 keeps for W",
    ),
    # pairs
    *(
        (PAIRED | more, {"family": family}, message)
        for more, message in IN_PAIRS
        for family in PAIR_FAMILIES
        if more is not SEPARATE_IN_CHUNKS or family == "dualpipev"
    ),
    *(
        (
            PAIRED | {"delay_wgrad_compute": True} | more,
            {"family": family},
            f"--delay-wgrad-compute: --vocab-parallel-family {family} runs F and B .* dualpipev or 1f1b-over",
        )
        for family in ("v-zb", "interleaved", "search", "auto")
        for more in ({}, {"overlap_moe_expert_parallel_comm": False} | TE)
    ),
    # options of the vocabulary layers
    (
        UNTIED | {"untie_embeddings_and_output_weights": False},
        {"options": FP32},
        r"untie them \(--untie-embeddings-and-",
    ),
    (UNTIED | {"save": "here"}, {"options": FP32}, "give --no-save-optim"),
    (UNTIED | {"load": "here"}, {"options": FP32}, "and --no-load-optim"),
    (UNTIED | {"hidden_size": 72}, {"options": FP8}, "fp8-head: hidden size 72 is no mul.* 16;"),
    # layers moved away from the last stage
    (
        {"pipeline_model_parallel_size": 1, "pipeline_model_parallel_layout": "EtL"},
        REDIS,
        "(?s)give --pipeline-model-parallel-size of at least 2.* leave out --pipeline-model-parallel-layout",
    ),
    (TWO | {"vocab_size": 100}, REDIS, "one model chunk per rank on 1f1b; leave out what asks for several"),
    ({}, REDIS | {"final_stage_layers": None}, "give --final-stage-num-layers N, or --vocab-size"),
)
"""Settings, flags of ours, and the sentence with which the two are refused, or strictly so."""

ACCEPTED: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"reuse_grad_buf_for_mxfp8_param_ag": True, "overlap_param_gather": False}, {}),
    (LOCAL_GRAPHS | {"hidden_dropout": 0.0}, CAPTURED),
    (ENGINE_GRAPHS, CAPTURED),
    (ENGINE_GRAPHS | {"cuda_graph_impl": "none", "external_cuda_graph": True}, CAPTURED),
    (ENGINE_GRAPHS | {"cuda_graph_warmup_steps": 1, "hybrid_layer_pattern": "*E|*E|*E|*E"}, CAPTURED),
    (PAIRED | TE | {"cuda_graph_impl": "transformer_engine"}, CAPTURED | {"family": "1f1b-overlap"}),
    *((settings, {"family": family}) for family, settings in FITS_A_FAMILY),
    (TWO_RANKS | {"defer_embedding_wgrad_compute": True}, {"family": "interleaved"}),
    *(
        (PAIRED | more, {"family": family})
        for family in PAIR_FAMILIES
        for more in (
            {},
            {"mtp_num_layers": 1},
            {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
            {"moe_layer_freq": [1] * 15 + [0]},
            {"delay_wgrad_compute": True} | TE,
            {"bf16": False, "fp16": True, "moe_token_dispatcher_type": "flex"},
        )
    ),
    (UNTIED, {"options": FP32}),
    (UNTIED | {"save": "here", "no_save_optim": True}, {"options": FP32}),
    (UNTIED | {"load": "here", "no_load_optim": True}, {"options": FP32}),
    (UNTIED | {"bf16": False, "save": "here"}, {"options": FP32}),
    (UNTIED | {"hidden_size": 48}, {"options": FP8}),
)
"""Settings and flags of ours that no rule forbids."""


LOGGED = {"moe_aux_loss_coeff": 1e-2}
EARLY = LOGGED | {"num_layers": 8, "num_experts": 8, "mtp_num_layers": 1}
"""Of a Megatron before 0.17."""
WAITS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("1f1b", EARLY | {"moe_layer_freq": [0, 0, 1, 1, 1, 1, 1, 1]}, "0.17: rank 0 has no layer with experts"),
    (
        "1f1b",
        EARLY | {"moe_layer_freq": 3, "pipeline_model_parallel_layout": "Ett|tt|tt|ttmL"},
        "rank 2 has no layer with experts, and Megatron's first log then waits for ever, stock's too; give",
    ),
    ("1f1b", EARLY | {"pipeline_model_parallel_layout": "E|ttt|tttt|tmL"}, "rank 0 has no layer with exp"),
    (
        "v-half",
        LOCAL
        | EARLY
        | {"pipeline_model_parallel_layout": "E|t|tt|t|t|t|tt|mL", "moe_layer_freq": [1] * 7 + [0]},
        "rank 0 has no layer with experts",
    ),
    ("1f1b", LOGGED | {"hybrid_layer_pattern": "*E|*-|*E|*E"}, "ever, stock's too; give each rank an E in"),
    (
        "v-half",
        LOCAL | {"moe_z_loss_coeff": 1e-3, "hybrid_layer_pattern": "*|-|*|E|E|*|-|E/*"},
        "rank 1 has no layer with experts",
    ),
)
FITS_EARLY: tuple[tuple[str, dict[str, Any]], ...] = (
    ("1f1b", EARLY | {"moe_aux_loss_coeff": [0.0], "moe_layer_freq": [0, 0, 1, 1, 1, 1, 1, 1]}),
    ("1f1b", LOGGED | {"hybrid_layer_pattern": "*E|*E|M-|*-/*E", "output_logit_dtype": None}),
    ("1f1b", LOGGED | {"hybrid_layer_pattern": "*E|*E|ME|*-/*E"}),
    ("1f1b", {"hybrid_layer_pattern": "*E|*-|*E|*E"}),
    ("1f1b", EARLY),
    ("1f1b", EARLY | {"moe_layer_freq": 2}),
    ("1f1b", EARLY | {"moe_layer_freq": [0, 0, 1, 1, 1, 1, 1, 1], "use_mup": False}),
    ("1f1b", EARLY | {"moe_layer_freq": [0, 0, 1, 1, 1, 1, 1, 1], "mtp_num_layers": None}),
    ("1f1b", EARLY | {"moe_layer_freq": [0] * 8}),
    ("1f1b", EARLY | {"moe_layer_freq": [0, 1, 1, 1, 1, 1, 1, 1], "decoder_first_pipeline_num_layers": 2}),
    ("v-half", LOCAL | EARLY | {"pipeline_model_parallel_layout": "E|t|tt|t|t|t|tt|mL"}),
)
"""Launch lines with which Megatron's first log waits for ever, or does not."""
