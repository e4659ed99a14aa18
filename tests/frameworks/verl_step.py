"""One step of verl's Megatron engine on this rank: its packing, log-probabilities, loss, update; on the CPU.

What stands in for something else: ``train/on_cpu.py``'s answers for CUDA; an attention that takes packed
sequences (``tests/gathered_attention.py``) for Transformer Engine's; ``mbridge``, of which the engine wants a
model of its configuration, and weights that stay as they are drawn; the checkpoint manager, which is not
called.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from functools import partial
from typing import Any
from unittest import mock

import torch

from megatron_vocabpar.train import on_cpu
from tests.frameworks.compare import counting_rows

VOCABULARY = 128
PROMPTS, RESPONSES = (5, 3, 6, 4), (4, 7, 3, 9)
"""Tokens of the samples' two parts, two samples a microbatch."""


def step(rank: int, loss: str, entropy_coeff: float, ours: bool) -> dict[str, Any]:
    """Log-probabilities, metrics of the update, and gradients of this rank."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    sys.path.insert(0, os.environ["VERL_PATH"])
    if ours:
        os.environ["VERL_USE_EXTERNAL_MODULES"] = "megatron_vocabpar.frameworks.door"
    on_cpu.stand_in()
    cpu = importlib.import_module("megatron_vocabpar.train.cpu")
    with cpu.megatron_on_cpu():
        importlib.import_module("verl")
        backends: Any = importlib.import_module("megatron.core.models.backends")
        backends.DotProductAttention = importlib.import_module("tests.gathered_attention").GatheredAttention
        return _step(_engine(), loss, entropy_coeff)


class _Bridge:
    """What the engine asks of ``mbridge.AutoBridge``."""

    def __init__(self) -> None:
        config = importlib.import_module("megatron.core.transformer").TransformerConfig
        self.config = config(
            num_layers=4,
            hidden_size=32,
            num_attention_heads=4,
            ffn_hidden_size=64,
            normalization="RMSNorm",
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            pipeline_model_parallel_size=torch.distributed.get_world_size(),
            pipeline_dtype=torch.float32,
            variable_seq_lengths=True,
            moe_token_dispatcher_type="alltoall",
            masked_softmax_fusion=False,
            gradient_accumulation_fusion=False,
            persist_layer_norm=False,
            apply_rope_fusion=False,
        )

    @classmethod
    def from_config(cls, *_: Any, **__: Any) -> _Bridge:
        return cls()

    def set_extra_args(self, **_: Any) -> None:
        pass

    def load_weights(self, *_: Any) -> None:
        pass

    def get_model(self, **_: Any) -> list[Any]:
        self.config.bf16 = False  # verl knows 16 bits alone, in which gradients say less
        mpu = importlib.import_module("megatron.core.parallel_state")
        distributed = importlib.import_module("megatron.core.distributed")
        specs = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
        importlib.import_module("megatron.core.tensor_parallel").model_parallel_cuda_manual_seed(1)
        model = importlib.import_module("megatron.core.models.gpt").GPTModel(
            config=self.config,
            transformer_layer_spec=specs.get_gpt_layer_local_spec(),
            vocab_size=VOCABULARY,
            max_sequence_length=64,
            pre_process=mpu.is_pipeline_first_stage(),
            post_process=mpu.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
        )
        return [
            distributed.DistributedDataParallel(
                self.config, distributed.DistributedDataParallelConfig(use_distributed_optimizer=True), model
            )
        ]


def _engine() -> Any:
    mbridge: Any = types.ModuleType("mbridge")
    mbridge.AutoBridge = _Bridge
    callbacks: Any = types.ModuleType("mbridge.utils.post_creation_callbacks")
    callbacks.freeze_moe_router = callbacks.make_value_model = None
    sys.modules |= {"mbridge": mbridge, "mbridge.utils": mbridge, callbacks.__name__: callbacks}
    implementation = importlib.import_module("verl.workers.engine.megatron.transformer_impl")
    implementation.MegatronCheckpointManager = mock.Mock()
    config = importlib.import_module("verl.workers.config")
    model_config = mock.MagicMock()
    model_config.architectures = ["LlamaForCausalLM"]
    model_config.hf_config = types.SimpleNamespace(architectures=model_config.architectures)
    model_config.tokenizer.pad_token_id = 0
    model_config.local_path, model_config.lora_rank, model_config.lora = "nothing", 0, {}
    model_config.get = lambda name, default=None: {"lora": {}}.get(name, default)
    engine = implementation.MegatronEngineWithLMHead(
        model_config,
        config.McoreEngineConfig(
            pipeline_model_parallel_size=torch.distributed.get_world_size(), sequence_parallel=False
        ),
        config.McoreOptimizerConfig(
            lr=1e-2,
            lr_decay_steps=10,
            total_training_steps=10,
            override_optimizer_config={"bf16": False, "params_dtype": torch.float32},
        ),
        mock.Mock(),
    )
    engine.initialize()
    return engine


def _step(engine: Any, loss: str, entropy_coeff: float) -> dict[str, Any]:
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
    metrics = {**trained["metrics"], "loss": trained["loss"]} if trained else {}
    return {"results": results, "metrics": metrics, "gradients": gradients, "rows": rows}


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
