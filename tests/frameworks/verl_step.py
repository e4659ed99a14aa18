"""One step of verl's Megatron engine on this rank: its packing, log-probabilities, loss, update; on the CPU.

What stands in for something else: ``train/on_cpu.py``'s answers for CUDA; 32 bits for 16, but for one case.
With Megatron Bridge, verl's default, the stand-in of Transformer Engine's compiled part and what Bridge
imports and does not call (``bridge_imports.py``). With mbridge (``vanilla_mbridge: True``) an attention that
takes packed sequences (``tests/gathered_attention.py``) and layers with norms (``tests/normed_layers.py``),
and no checkpoint manager.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from megatron_vocabpar.train import on_cpu
from tests.frameworks import bridge_imports
from tests.frameworks.bridge_step import draw_adapters
from tests.frameworks.compare import counting_rows
from tests.frameworks.hugging_face import VOCABULARY

_NOT_HERE = (
    "masked_softmax_fusion",
    "gradient_accumulation_fusion",
    "persist_layer_norm",
    "apply_rope_fusion",
)
_NOT_HERE_EITHER = ("moe_router_fusion", "moe_permute_fusion")
PROMPTS, RESPONSES = (5, 3, 6, 4), (4, 7, 3, 9)
"""Tokens of the samples' two parts, two samples a microbatch."""


@dataclass(frozen=True)
class Case:
    """An actor and its loss.

    Attributes:
        loss: of ``verl.workers.utils.losses``.
        kind: of ``write_checkpoint``.
        chunks: of each rank.
        experts: ranks that share a layer's experts; as many copies of the pipeline.
        lora: whether adapters alone are trained.
        reference: whether a second, frozen model gives the log-probabilities of the KL term.
        vanilla: mbridge in place of Megatron Bridge.
        dtype: of weights and computation.
    """

    loss: str = "ppo_loss"
    entropy_coeff: float = 0.0
    tied: bool = False
    kind: str = "qwen2"
    chunks: int = 1
    experts: int = 1
    lora: bool = False
    reference: bool = False
    vanilla: bool = False
    dtype: str = "float32"

    @property
    def flags(self) -> str:
        """Of ``VOCAB_PARALLEL_FLAGS``."""
        family = "interleaved" if self.chunks > 1 else "1f1b"
        return f"--enable-vocab-parallel --vocab-parallel-strict --vocab-parallel-family {family}"


def step(rank: int, case: Case, ours: bool, folder: Path, load: Path | None, save: Path | None) -> Any:
    """Log-probabilities, metrics and gradients of the update on this rank, weights before and after it.

    Args:
        folder: of the checkpoint to start from, in Hugging Face's format; ``reference`` in it is another.
        load: a checkpoint of verl's to go on from.
        save: where to write one after the update; another update follows then.
    """
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "HF_HUB_OFFLINE": "1"}
    sys.path.insert(0, os.environ["VERL_PATH"])
    os.environ.pop("VOCAB_PARALLEL_FLAGS", None)  # the shell's, which would open the door to stock
    if ours:
        os.environ |= _door(Path(os.environ["VERL_PATH"]), case)
    on_cpu.stand_in()
    if not case.vanilla:
        _with_bridge()
    cpu = importlib.import_module("megatron_vocabpar.train.core_on_cpu")
    with cpu.megatron_on_cpu():
        importlib.import_module("verl")
        if case.vanilla:
            _with_mbridge()
        engine = _engine(case, folder, importlib.import_module("verl.trainer.config").CheckpointConfig())
        if load is not None:
            engine.load_checkpoint(str(load))
        found = _step(engine, case, _engine(case, folder / "reference") if case.reference else None)
        if save is not None:
            engine.save_checkpoint(str(save))
            found["weights"] += _step(engine, case, None)["weights"]
        return changed(found, torch.Tensor, lambda tensor: tensor.detach().float().numpy().copy())


def _door(checkout: Path, case: Case) -> dict[str, str]:
    """What opens it: verl's entry point for plugins where the release has one (v0.8), else its variable."""
    flags = {"VOCAB_PARALLEL_FLAGS": case.flags}
    if "verl.plugins" in (checkout / "verl" / "__init__.py").read_text():
        return flags
    return flags | {"VERL_USE_EXTERNAL_MODULES": "megatron_vocabpar.frameworks.door"}


def _with_bridge() -> None:
    bridge_imports.install()
    on_cpu.skip_compilation()
    on_cpu.name_what_is_missing()
    on_cpu.exchange_tokens_by_sizes()
    importlib.import_module("transformer_engine.pytorch")
    compiled = vars(sys.modules["transformer_engine_torch"])
    compiled |= {"convert_thd_to_bshd": _padded_of_packed, "convert_bshd_to_thd": _packed_of_padded}


def _padded_of_packed(packed: torch.Tensor, ends: torch.Tensor, b: int, longest: int) -> torch.Tensor:
    """``[b, longest, ...]`` of ``[t, ...]``, whose sequences end at ``ends[1:]``."""
    padded = packed.new_zeros(b, longest, *packed.shape[1:])
    for i, sequence in enumerate(packed[ends[0] : ends[-1]].split(ends.diff().tolist())):
        padded[i, : len(sequence)] = sequence
    return padded


def _packed_of_padded(padded: torch.Tensor, ends: torch.Tensor, t: int) -> torch.Tensor:
    """The reverse."""
    packed = padded.new_zeros(t, *padded.shape[2:])
    sizes = ends.diff().tolist()
    packed[ends[0] : ends[-1]] = torch.cat([row[:n] for row, n in zip(padded, sizes, strict=True)])
    return packed


def _with_mbridge() -> None:
    backends: Any = importlib.import_module("megatron.core.models.backends")
    backends.DotProductAttention = importlib.import_module("tests.gathered_attention").GatheredAttention
    _single_precision(importlib.import_module("mbridge"))
    llm_bridge = vars(importlib.import_module("mbridge.core.llm_bridge"))
    llm_bridge["get_gpt_decoder_block_spec"] = importlib.import_module("tests.normed_layers").layer_spec
    implementation = importlib.import_module("verl.workers.engine.megatron.transformer_impl")
    implementation.MegatronCheckpointManager = mock.Mock()


def _single_precision(bridges: Any) -> None:
    """verl knows 16 bits alone, in which gradients say less."""
    from_config = bridges.AutoBridge.from_config

    def fp32(config: Any, dtype: torch.dtype) -> Any:
        bridge = from_config(config, dtype=torch.float32)
        get_model = bridge.get_model

        def get_fp32_model(**options: Any) -> Any:
            bridge.config.bf16 = False
            importlib.import_module("megatron.core.tensor_parallel").model_parallel_cuda_manual_seed(1)
            return get_model(**options | {"bf16": False})

        bridge.get_model = get_fp32_model
        return bridge

    bridges.AutoBridge.from_config = fp32


def _engine(case: Case, folder: Path, checkpoints: Any = None) -> Any:
    """An actor, or without ``checkpoints`` a frozen model."""
    implementation = importlib.import_module("verl.workers.engine.megatron.transformer_impl")
    config = importlib.import_module("verl.workers.config")
    model_config = mock.MagicMock()
    model_config.hf_config = importlib.import_module("transformers").AutoConfig.from_pretrained(folder)
    model_config.architectures = model_config.hf_config.architectures
    model_config.tokenizer.pad_token_id = 0
    model_config.local_path, model_config.lora_rank = str(folder), 0
    model_config.lora = {"rank": 4, "alpha": 8, "dropout": 0.0, "merge": True} if case.lora else {}
    model_config.mtp.enable, model_config.model_type = False, "language_model"
    model_config.share_embeddings_and_output_weights = model_config.hf_config.tie_word_embeddings
    model_config.get = lambda name, default=None: {"lora": model_config.lora}.get(name, default)
    settings: dict[str, Any] = dict.fromkeys(_NOT_HERE, False)
    if not case.vanilla:
        settings |= {"attention_backend": "unfused"} | dict.fromkeys(_NOT_HERE_EITHER, False)
    engine_config = config.McoreEngineConfig(
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=case.chunks if case.chunks > 1 else None,
        expert_model_parallel_size=case.experts,
        sequence_parallel=False,
        vanilla_mbridge=case.vanilla,
        forward_only=checkpoints is None,
        dist_ckpt_optim_fully_reshardable=True,  # else states of buckets, which other models have, too
        override_transformer_config=settings,
    )
    optimizer = {"adam_eps": 1.0}
    if case.dtype == "float32":
        optimizer |= {"bf16": False, "params_dtype": torch.float32}
        if not case.vanilla:  # which verl refuses
            object.__setattr__(engine_config, "dtype", "float32")
    engine = implementation.MegatronEngineWithLMHead(
        model_config,
        engine_config,
        config.McoreOptimizerConfig(
            lr=1, lr_decay_steps=10, total_training_steps=10, override_optimizer_config=optimizer
        ),
        checkpoints,
    )
    engine.initialize()
    return engine


def _step(engine: Any, case: Case, reference: Any) -> dict[str, Any]:
    weights = [_exported(engine, case)]
    if case.lora:
        draw_adapters(engine.module)
    losses = importlib.import_module("verl.workers.utils.losses")
    actor = importlib.import_module("verl.workers.config").ActorConfig(
        strategy="megatron",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=2,
        use_kl_loss=True,
        entropy_coeff=case.entropy_coeff,
    )
    unwrap = importlib.import_module("megatron.core.utils").unwrap_model
    rows = counting_rows(unwrap(engine.module[0]))
    known: dict[str, torch.Tensor] = {}
    if reference is not None:
        known["ref_log_prob"] = _log_probs_of_responses(reference)
    with engine.eval_mode(disable_auto_offload=True):
        results = engine.infer_batch(_batch(engine, known, calculate_entropy=True))
    gradients: dict[str, torch.Tensor] = {}
    update = engine.optimizer.step

    def watched_update() -> Any:
        for i, chunk in enumerate(engine.module):
            for name, parameter in chunk.named_parameters():
                if parameter.requires_grad:
                    chunks_own = f"chunk {i}: " if ".layers." in name and case.chunks > 1 else ""
                    gradients[chunks_own + name] = parameter.main_grad.clone()
        return update()

    engine.optimizer.step = watched_update
    with engine.train_mode(disable_auto_offload=True):
        # Entropies as verl's trainer asks for them.
        batch = _batch(engine, known, calculate_entropy=case.entropy_coeff != 0)
        trained = engine.train_batch(batch, partial(getattr(losses, case.loss), config=actor))
    engine.optimizer.step = update
    results = {name: value.values() for name, value in results.get("model_output", {}).items()}
    weights.append(_exported(engine, case))
    metrics = {**trained["metrics"], "loss": trained["loss"]} if trained else {}
    # Objects of verl's from v0.8 on; other processes do without verl.
    metrics = {
        name: metric.values if hasattr(metric, "aggregate") else metric for name, metric in metrics.items()
    }
    if case.experts > 1:
        gradients.clear()  # a rank has the sums of its part alone; the weights are compared
    found = {"results": results, "metrics": metrics, "gradients": gradients}
    return found | {"rows": rows, "weights": weights}


def _log_probs_of_responses(engine: Any) -> torch.Tensor:
    """``[samples, longest]`` as verl's trainer sends them to the actor, on every rank."""
    with engine.eval_mode(disable_auto_offload=True):
        found = engine.infer_batch(_batch(engine, {}, calculate_entropy=False))
    padded = torch.zeros(len(RESPONSES), max(RESPONSES))
    if found:
        for row, n, values in zip(
            padded, RESPONSES, found["model_output"]["log_probs"].unbind(), strict=True
        ):
            row[:n] = values[-n - 1 : -1]
    torch.distributed.all_reduce(padded, group=_pipeline())
    return padded


def _pipeline() -> Any:
    """The ranks of this pipeline."""
    return importlib.import_module("megatron.core.parallel_state").get_pipeline_model_parallel_group()


def _exported(engine: Any, case: Case) -> dict[str, torch.Tensor]:
    """What the engine would send to the rollout; verl's own converter gives the same."""
    weights, _ = engine.get_per_tensor_param()
    found = {name: value.detach().clone() for name, value in weights}
    if not case.vanilla:
        return found
    config = engine.model_config.hf_config
    convert = importlib.import_module("verl.models.mcore").get_mcore_weight_converter(config, torch.float32)
    names = {"qkv_layer_name": "self_attention.linear_qkv.", "gate_proj_layer_name": "linear_fc1."}
    walk = importlib.import_module("verl.utils.megatron_utils").per_tensor_generator
    other = dict(walk(engine.module, config, convert, engine.tf_config, names))
    assert other.keys() - {"lm_head.weight"} == found.keys() - {"lm_head.weight"}  # tied: named twice
    assert all(torch.equal(other[name], value) for name, value in found.items())
    return found


def _batch(engine: Any, known: dict[str, torch.Tensor], **options: Any) -> Any:
    """What the trainer would have sent to this copy of the pipeline, with tensors that are known already."""
    random = torch.Generator().manual_seed(1 + engine.get_data_parallel_rank())
    tensordict = importlib.import_module("verl.utils.tensordict_utils")

    def padded(make: Any) -> torch.Tensor:
        return torch.stack([torch.nn.functional.pad(make(n), (0, max(RESPONSES) - n)) for n in RESPONSES])

    ids = [
        torch.randint(VOCABULARY, (p + r,), generator=random) for p, r in zip(PROMPTS, RESPONSES, strict=True)
    ]
    masks = [torch.arange(p + r) >= p for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    tensors = {
        "input_ids": torch.nested.as_nested_tensor(ids, layout=torch.jagged),
        "loss_mask": torch.nested.as_nested_tensor(masks, layout=torch.jagged),
        "prompts": torch.zeros(len(ids), max(PROMPTS), dtype=torch.int64),
        "responses": torch.zeros(len(ids), max(RESPONSES), dtype=torch.int64),
        "attention_mask": torch.stack(
            [
                torch.cat([torch.arange(max(PROMPTS)) >= max(PROMPTS) - p, torch.arange(max(RESPONSES)) < r])
                for p, r in zip(PROMPTS, RESPONSES, strict=True)
            ]
        ).long(),
        "response_mask": padded(lambda n: torch.ones(n)),
        "old_log_probs": padded(lambda n: -5 + torch.randn(n, generator=random) / 2),
        "ref_log_prob": padded(lambda n: -5 + torch.randn(n, generator=random) / 2),
        "advantages": padded(lambda n: torch.randn((), generator=random).repeat(n)),
    }
    others = {
        "temperature": 0.7,
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": 2,
        "global_batch_size": len(ids),
    }
    return tensordict.get_tensordict(tensors | known, others | options)


def changed(found: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Everything of a kind changed, in dictionaries and lists.

    Ranks return arrays: Megatron 0.19 pickles tensors by a function of its own, which the reader lacks.
    """
    if isinstance(found, kind):
        return change(found)
    if isinstance(found, dict):
        return {name: changed(value, kind, change) for name, value in found.items()}
    return [changed(value, kind, change) for value in found] if isinstance(found, list) else found
