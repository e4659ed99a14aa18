"""One step of verl's Megatron engine on this rank: its packing, log-probabilities, loss, update; on the CPU.

What stands in for something else: ``train/on_cpu.py``'s answers for CUDA; an attention that takes packed
sequences (``tests/gathered_attention.py``) and layers with norms (``tests/normed_layers.py``) for Transformer
Engine's; 32 bits for 16; the checkpoint manager, which is not called.
"""

from __future__ import annotations

import importlib
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from megatron_vocabpar.train import on_cpu
from tests.frameworks.compare import counting_rows
from tests.frameworks.hugging_face import VOCABULARY

_NOT_HERE = (
    "masked_softmax_fusion",
    "gradient_accumulation_fusion",
    "persist_layer_norm",
    "apply_rope_fusion",
)
PROMPTS, RESPONSES = (5, 3, 6, 4), (4, 7, 3, 9)
"""Tokens of the samples' two parts, two samples a microbatch."""


def step(rank: int, loss: str, entropy_coeff: float, ours: bool, folder: Path) -> dict[str, Any]:
    """Log-probabilities, metrics and gradients of the update on this rank, weights before and after it."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    sys.path.insert(0, os.environ["VERL_PATH"])
    if ours:
        os.environ |= _door(Path(os.environ["VERL_PATH"]))
    on_cpu.stand_in()
    cpu = importlib.import_module("megatron_vocabpar.train.cpu")
    with cpu.megatron_on_cpu():
        importlib.import_module("verl")
        backends: Any = importlib.import_module("megatron.core.models.backends")
        backends.DotProductAttention = importlib.import_module("tests.gathered_attention").GatheredAttention
        return _step(_engine(folder), loss, entropy_coeff)


def _door(checkout: Path) -> dict[str, str]:
    """What opens it: verl's entry point for plugins where the release has one (v0.8), else its variable."""
    if "verl.plugins" in (checkout / "verl" / "__init__.py").read_text():
        return {"VOCAB_PARALLEL_FLAGS": "--enable-vocab-parallel"}
    return {"VERL_USE_EXTERNAL_MODULES": "megatron_vocabpar.frameworks.door"}


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


def _engine(folder: Path) -> Any:
    _single_precision(importlib.import_module("mbridge"))
    llm_bridge = vars(importlib.import_module("mbridge.core.llm_bridge"))
    llm_bridge["get_gpt_decoder_block_spec"] = importlib.import_module("tests.normed_layers").layer_spec
    implementation = importlib.import_module("verl.workers.engine.megatron.transformer_impl")
    implementation.MegatronCheckpointManager = mock.Mock()
    config = importlib.import_module("verl.workers.config")
    model_config = mock.MagicMock()
    model_config.architectures = ["Qwen2ForCausalLM"]
    model_config.hf_config = importlib.import_module("transformers").AutoConfig.from_pretrained(folder)
    model_config.tokenizer.pad_token_id = 0
    model_config.local_path, model_config.lora_rank, model_config.lora = str(folder), 0, {}
    model_config.mtp.enable, model_config.model_type = False, "language_model"
    model_config.share_embeddings_and_output_weights = model_config.hf_config.tie_word_embeddings
    model_config.get = lambda name, default=None: {"lora": {}}.get(name, default)
    engine = implementation.MegatronEngineWithLMHead(
        model_config,
        config.McoreEngineConfig(
            pipeline_model_parallel_size=torch.distributed.get_world_size(),
            sequence_parallel=False,
            vanilla_mbridge=True,
            override_transformer_config=dict.fromkeys(_NOT_HERE, False),
        ),
        config.McoreOptimizerConfig(
            lr=1,
            lr_decay_steps=10,
            total_training_steps=10,
            override_optimizer_config={"bf16": False, "params_dtype": torch.float32, "adam_eps": 1.0},
        ),
        mock.Mock(),
    )
    engine.initialize()
    return engine


def _step(engine: Any, loss: str, entropy_coeff: float) -> dict[str, Any]:
    weights = [_exported(engine)]
    losses = importlib.import_module("verl.workers.utils.losses")
    actor = importlib.import_module("verl.workers.config").ActorConfig(
        strategy="megatron",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=2,
        use_kl_loss=True,
        entropy_coeff=entropy_coeff,
    )
    rows = counting_rows(engine.module[0].module)
    with engine.eval_mode(disable_auto_offload=True):
        results = engine.infer_batch(_batch(calculate_entropy=True))
    gradients: dict[str, torch.Tensor] = {}
    update = engine.optimizer.step

    def watched_update() -> Any:
        for name, parameter in engine.module[0].named_parameters():
            gradients[name] = parameter.main_grad.clone()
        return update()

    engine.optimizer.step = watched_update
    with engine.train_mode(disable_auto_offload=True):
        batch = _batch(calculate_entropy=entropy_coeff != 0)  # as verl's trainer asks for them
        trained = engine.train_batch(batch, partial(getattr(losses, loss), config=actor))
    results = {name: value.values() for name, value in results.get("model_output", {}).items()}
    weights.append(_exported(engine))
    metrics = {**trained["metrics"], "loss": trained["loss"]} if trained else {}
    # Objects of verl's from v0.8 on; other processes do without verl.
    metrics = {name: getattr(metric, "values", metric) for name, metric in metrics.items()}
    found = {"results": results, "metrics": metrics, "gradients": gradients}
    return found | {"rows": rows, "weights": weights}


def _exported(engine: Any) -> dict[str, torch.Tensor]:
    """What the engine would send to the rollout; verl's own converter gives the same."""
    weights, _ = engine.get_per_tensor_param()
    found = {name: value.detach().clone() for name, value in weights}
    config = engine.model_config.hf_config
    convert = importlib.import_module("verl.models.mcore").get_mcore_weight_converter(config, torch.float32)
    names = {"qkv_layer_name": "self_attention.linear_qkv.", "gate_proj_layer_name": "linear_fc1."}
    walk = importlib.import_module("verl.utils.megatron_utils").per_tensor_generator
    other = dict(walk(engine.module, config, convert, engine.tf_config, names))
    assert other.keys() - {"lm_head.weight"} == found.keys() - {"lm_head.weight"}  # tied: named twice
    assert all(torch.equal(other[name], value) for name, value in found.items())
    return found


def _batch(**options: Any) -> Any:
    """What the trainer would have sent: the same on all ranks."""
    random = torch.Generator().manual_seed(1)
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
    return tensordict.get_tensordict(tensors, others | options)
