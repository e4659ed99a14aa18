"""The table of rules: every row applies to a case, at the level that was chosen, and none to a plain one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_vocabpar.megatron_lm.flag_config import FlagConfig
from megatron_vocabpar.megatron_lm.rules.arguments import REVIEW_OF, RULED
from megatron_vocabpar.megatron_lm.rules.check import TABLES, check, facts_of, said_of
from megatron_vocabpar.pipeline.options import VocabOptions
from megatron_vocabpar.pipeline.rules.rule import IMPOSSIBLE, UNTESTED, Rule
from tests.support.megatron_parser import PLAIN

RULES = [rule for table in TABLES for rule in table]

FLAGS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"use_legacy_models": True}, "GPTModel is partitioned; leave it out"),
    ({"use_megatron_fsdp": True}, "use --use-distributed-optimizer instead"),
    ({"use_custom_fsdp": True}, "use --use-distributed-optimizer instead"),
    ({"use_torch_fsdp2": True}, "use --use-distributed-optimizer instead"),
    ({"cuda_graph_impl": "full_iteration"}, "use --cuda-graph-impl local"),
    ({"external_cuda_graph": True}, "use --enable-cuda-graph"),
    ({"cuda_graph_impl": "local", "cuda_graph_scope": []}, "gave wrong gradients"),
    ({"cuda_graph_impl": "local", "mtp_detach_heads": False}, "gave wrong gradients"),
    ({"optimizer_cuda_graph": True}, "leave it out"),
    ({"overlap_dispatch_backward_with_experts_wgrad": True}, "leave it out"),
    ({"fp16_lm_cross_entropy": True}, "leave it out"),
    ({"logit_dtype": "bf16"}, "logits are float32 here; leave it out"),
    ({"fp8_output_proj": True}, "use --vocab-parallel-fp8-head mxfp8"),
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
    ({"perform_rl_step": True}, "leave it out"),
    ({"delay_wgrad_compute": True}, "--delay-wgrad-compute: .* use dualpipev or 1f1b-overlap, or leave it"),
)
"""Settings that are refused or warned of in 1F1B, and what to do."""

STORED = {"logits_load_dir": "teacher", "logits_load_kd_loss_alpha": 0.5}
SAVED = {"logits_save_dir": "teacher"}
LOGITS: tuple[tuple[dict[str, Any], str], ...] = (
    (STORED | {"logits_load_kd_loss_alpha": 2.0}, "--logits-load-kd-loss-alpha 2.0: .* give 0 to 1"),
    (STORED | {"logits_load_ignore_errors": True}, "--logits-load-ignore-errors: .* leave it out"),
    (STORED | {"mtp_num_layers": 1}, "--logits-load-dir with multi-token prediction: .* leave out one"),
    (STORED | {"fp16": True}, "--logits-load-dir in float16: .*--bf16.*--vocab-parallel-fp32-head"),
    (SAVED | {"mtp_num_layers": 1}, "--logits-save-dir with multi-token prediction: .* leave out one"),
    (
        SAVED | {"freeze_all_layers": True, "logit_dtype": None},
        "--logits-save-dir with --freeze-all-layers: .* leave out one",
    ),
    (SAVED | {"sft": True}, "--logits-save-dir with --sft: .* leave out one"),
    (SAVED | {"use_mup": True}, "--logits-save-dir with --use-mup: .* leave out one"),
    (SAVED | STORED, "--logits-save-dir with --logits-load-dir: .* leave out one"),
)

LOCAL_GRAPHS = {"cuda_graph_impl": "local", "cuda_graph_scope": "full"}
TWO = {"num_virtual_stages_per_pipeline_rank": 2, "transformer_impl": "local"}
TE = {"transformer_impl": "transformer_engine"}
PAIRED = TWO | {
    "overlap_moe_expert_parallel_comm": True,
    "bf16": True,
    "num_experts": 8,
    "expert_model_parallel_size": 2,
    "moe_token_dispatcher_type": "alltoall",
}
HEADS = {"hidden_size": 48, "bf16": True, "untie_embeddings_and_output_weights": True}
METRICS, SCALED = VocabOptions(metrics=("entropy",)), VocabOptions(logit_scale=0.5)
FP32, FP8, FUSED = (
    VocabOptions(fp32_head=True),
    VocabOptions(fp8_head="mxfp8"),
    VocabOptions(kernels="fused"),
)
REDIS = {"method": "redis", "redistribute": True, "final_stage_layers": 1}

COMBINED: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    (LOCAL_GRAPHS, {"family": "zb-h1", "profile_iterations": 0}),
    (LOCAL_GRAPHS | {"pipeline_model_parallel_size": 1}, {"profile_iterations": 0}),
    (LOCAL_GRAPHS, {}),
    (LOCAL_GRAPHS | {"rampup_batch_size": [4, 4, 64]}, {}),
    ({"cuda_graph_impl": "transformer_engine", "cuda_graph_warmup_steps": 0}, {}),
    (LOCAL_GRAPHS | {"attention_dropout": 0.1}, {}),
    (LOCAL_GRAPHS | {"recompute_granularity": "full"}, {}),
    ({"hybrid_layer_pattern": "*-|*-|*-"}, {}),
    ({}, {"family": "v-half"}),
    (TWO | {"pipeline_model_parallel_size": 1}, {"family": "interleaved"}),
    (TWO | {"pipeline_model_parallel_size": 2, "overlap_p2p_comm": False}, {"family": "v-zb"}),
    (TWO | {"pipeline_model_parallel_layout": "Et|t|t|t|t|t|tm|L"}, {"family": "v-half"}),
    ({"dataloader_inter_document_masking": True}, {}),
    ({"iterations_to_skip": [3]}, {}),
    (TWO | {"heterogeneous_layers_config_path": "a.json"}, {"family": "interleaved"}),
    ({"num_layers": 7}, {}),
    ({"transformer_impl": "inference_optimized"}, {"family": "zb-h1"}),
    (TE | {"overlap_grad_reduce": True, "tp_comm_overlap": True}, {"family": "zb-h1"}),
    (TE | {"overlap_dispatch_backward_with_experts_wgrad": True}, {"family": "zb-h1"}),
    (TWO | {"mtp_num_layers": 1}, {"family": "v-half", "method": "baseline"}),
    (TWO | {"defer_embedding_wgrad_compute": True}, {"family": "v-half", "method": "baseline"}),
    (TWO | {"variable_seq_lengths": True}, {"family": "v-half", "method": "baseline"}),
    (TWO, {"family": "dualpipev"}),
    (PAIRED, {"family": "interleaved"}),
    *(
        (PAIRED | more, {"family": "dualpipev"})
        for more in (
            {"bf16": False},
            {"num_experts": None},
            {"moe_token_dispatcher_type": "allgather"},
            {"recompute_granularity": "full"},
            {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
            {"moe_shared_expert_overlap": True},
            {"mtp_num_layers": 2},
            {"mtp_num_layers": 1, "num_layers": 16, "moe_layer_freq": 2},
            {"pipeline_model_parallel_layout": "Et|t|t|t|t|t|tm|L"},
            {"hybrid_layer_pattern": "|".join(["*E"] * 8)},
            LOCAL_GRAPHS,
            {"cuda_graph_impl": "transformer_engine", "fp4": "e2m1"},
            {"cpu_offloading_num_layers": 1},
            {"delay_wgrad_compute": True, "moe_use_legacy_grouped_gemm": True},
        )
    ),
    (STORED, {"options": METRICS}),
    (SAVED, {"options": METRICS}),
    (SAVED, {"options": SCALED}),
    (HEADS | {"untie_embeddings_and_output_weights": False, "save": "here"}, {"options": FP32}),
    (HEADS | {"bf16": False}, {"options": FUSED}),
    (HEADS, {"options": FP8}),
    (HEADS | {"hidden_size": 68}, {"options": FUSED}),
    ({"pipeline_model_parallel_size": 1, "pipeline_model_parallel_layout": "EtL"}, REDIS),
    (TWO | {"vocab_size": 100}, REDIS),
    ({}, REDIS | {"final_stage_layers": None}),
)
"""Settings, and flags of ours with which they are refused or warned of."""

NOT_RUN = {
    "--optimizer-cuda-graph",
    "--overlap-dispatch-backward-with-experts-wgrad",
    "--rerun-mode report_stats",
    "--check-for-spiky-loss",
    "--reuse-grad-buf-for-mxfp8-param-ag with --overlap-param-gather, with Megatron before 0.19",
    "CUDA graphs of layers with {found}",
    "--overlap-moe-expert-parallel-comm",
}
"""Rows of which some are warnings alone; numbers may be wrong, or a job hang, with all others."""


def config_of(**more: Any) -> FlagConfig:
    return FlagConfig(**{"enabled": True, "method": "vocab-2"} | more)


def cases() -> Iterator[tuple[dict[str, Any], FlagConfig]]:
    yield from ((settings, config_of()) for settings, _ in (*FLAGS, *LOGITS))
    yield from ((settings, config_of(**more)) for settings, more in COMBINED)


def applying(settings: dict[str, Any], config: FlagConfig) -> list[Rule]:
    facts = facts_of(SimpleNamespace(**PLAIN | settings), config)
    return [rule for rule in RULES if rule.sentence(facts)]


@pytest.mark.parametrize(("settings", "remedy"), [*FLAGS, *LOGITS])
def test_a_flag_is_named_with_its_remedy(settings: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        check(SimpleNamespace(**PLAIN | settings), config_of(strict=True))
    assert check(SimpleNamespace(**PLAIN | settings), FlagConfig()) == ""


@pytest.mark.parametrize(("settings", "more"), COMBINED)
def test_a_combination_is_refused_or_warned_of(settings: dict[str, Any], more: dict[str, Any]) -> None:
    assert applying(settings, config_of(**more))


def test_every_row_applies_to_a_case_and_none_to_a_plain_training(tmp_path: Path) -> None:
    assert applying({}, config_of()) == []
    applied = {id(rule) for settings, config in cases() for rule in applying(settings, config)}
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    for name in ("mp_rank_00", "modelopt_state"):
        (tmp_path / "iter_0000003" / name).mkdir(parents=True)
        applied |= {id(rule) for rule in applying({"load": str(tmp_path)}, config_of())}
    assert [rule.why for rule in RULES if id(rule) not in applied] == []


def test_what_is_only_a_warning_was_chosen() -> None:
    assert {rule.id for rule in RULES if rule.level == UNTESTED} == NOT_RUN
    assert sum(rule.level == UNTESTED for rule in RULES) == len(NOT_RUN) + 2


def test_what_nobody_has_run_is_one_warning_and_strictly_an_error() -> None:
    args = SimpleNamespace(**PLAIN, check_for_spiky_loss=True, optimizer_cuda_graph=True)
    warning = check(args, config_of(), ["--fresh-idea 4: nobody has read it"])
    assert warning.startswith("> --enable-vocab-parallel: nobody has run this")
    assert [line.split(":")[0].strip() for line in warning.splitlines()[1:]] == [
        "--fresh-idea 4",
        "--optimizer-cuda-graph",
        "--check-for-spiky-loss",
    ]
    with pytest.raises(ValueError, match=r"refuses these flags:\n  --fresh-idea 4"):
        check(args, config_of(strict=True), ["--fresh-idea 4: nobody has read it"])
    args.inprocess_restart = True
    with pytest.raises(ValueError, match="--inprocess-restart") as error:
        check(args, config_of())
    assert "spiky" not in str(error.value)


def test_rules_have_texts_that_can_be_filled_in() -> None:
    for settings, config in cases():
        said = said_of(SimpleNamespace(**PLAIN | settings), config)
        assert not any("{" in line or "None" in line for line in (*said[IMPOSSIBLE], *said[UNTESTED]))


class Asked(SimpleNamespace):
    """Settings that keep account of what is asked of them."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            self.__dict__.setdefault("asked", set()).add(name)
        raise AttributeError(name)


def test_rules_look_at_the_options_that_are_said_to_be_ruled() -> None:
    asked: set[str] = set()
    for settings, config in cases():
        args = Asked(**PLAIN | settings)
        said_of(args, config)
        asked |= vars(args).pop("asked", set()) | set(settings)
    ruled = {name for name, row in REVIEW_OF.items() if row.verdict == RULED}
    assert sorted(ruled - asked - {"yaml_cfg", "wgrad_deferral_limit", "pretrained_checkpoint"}) == []
