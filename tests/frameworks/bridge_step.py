"""Bridge's ``pretrain`` of a shrunk recipe on this rank, from and to Hugging Face's format; on the CPU.

What stands in for something else: ``train/on_cpu.py``'s answers for CUDA, the stand-in of Transformer
Engine's compiled part (``tests/transformer_engine``), and names of libraries that Bridge imports and does not
call here (``bridge_imports.py``).
"""

from __future__ import annotations

import importlib
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_vocabpar.train import on_cpu
from tests.frameworks import bridge_imports
from tests.frameworks.hugging_face import VOCABULARY, layers_of

ITERATIONS = 3
LLAMA = "llama.h100.llama3:llama3_70b_pretrain_64gpu_h100_bf16_config"
"""A recipe with documents that are made up."""


def step(rank: int, recipe: str, flags: str | None, folder: Path) -> dict[str, Any]:
    """Losses, gradient norms and evaluations of a training, and weights of this rank before and after it.

    Args:
        recipe: module of ``megatron.bridge.perf_recipes`` and function, separated by a colon.
        flags: of ``VOCAB_PARALLEL_FLAGS``; None for stock.
        folder: of the checkpoint to start from; it gets ``saved``, another one, after the training.
    """
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "HF_HUB_OFFLINE": "1"}
    on_cpu.stand_in()
    bridge_imports.install()
    on_cpu.skip_compilation()
    on_cpu.make_up_fewer_documents()
    on_cpu.name_what_is_missing()
    on_cpu.exchange_tokens_by_sizes()
    cpu = importlib.import_module("megatron_vocabpar.train.core_on_cpu")
    with cpu.megatron_on_cpu():
        pretrain = importlib.import_module("megatron.bridge.training.pretrain")
        if flags is not None:
            os.environ["VOCAB_PARALLEL_FLAGS"] = flags
            importlib.import_module("megatron_vocabpar.frameworks.door")
        config = _shrunk(recipe, folder)
        forward_step = importlib.import_module("megatron.bridge.training.gpt_step").forward_step
        record = _record(folder)
        pretrain.pretrain(config, forward_step, [record])
        return dict(record.found)


def _made(recipe: str, folder: Path) -> Any:
    """The configuration of a recipe, of the model in ``folder``."""
    bridges = importlib.import_module("megatron.bridge").AutoBridge
    from_hf_pretrained = bridges.from_hf_pretrained
    bridges.from_hf_pretrained = lambda *_, **__: from_hf_pretrained(folder)
    module, _, name = recipe.partition(":")
    config = getattr(importlib.import_module(f"megatron.bridge.perf_recipes.{module}"), name)()
    bridges.from_hf_pretrained = from_hf_pretrained
    return config


def _shrunk(recipe: str, folder: Path) -> Any:
    """The recipe with the small model of ``folder``, two stages and a few short sequences."""
    config = _made(recipe, folder)
    if config.peft is not None:  # instead of a data set of Hugging Face's, which is somewhere else
        config.dataset = _made(LLAMA, folder).dataset
    hybrid = hasattr(config.model, "hybrid_layer_pattern")  # of one chunk, says Bridge
    chunks = 2 if config.model.virtual_pipeline_model_parallel_size and not hybrid else None
    mixed_precision = importlib.import_module("megatron.bridge.training.mixed_precision").MixedPrecisionConfig
    config.mixed_precision = mixed_precision(
        fp32=True, params_dtype=torch.float32, pipeline_dtype=torch.float32
    )
    figures = {"num_layers": layers_of(folder), "virtual_pipeline_model_parallel_size": chunks}
    _set(config.model, _MODEL | figures)
    _set(config.tokenizer, {"tokenizer_type": "NullTokenizer", "vocab_size": VOCABULARY - 1})
    _set(config.dataset, {"seq_length": 32, "num_workers": 0, "split": "90,10,0"})
    _set(config.train, {"train_iters": ITERATIONS, "global_batch_size": 4, "micro_batch_size": 1})
    _set(config.train, {"eval_iters": None, "eval_interval": None})  # their old place
    _set(config.validation, {"eval_iters": 2, "eval_interval": 2})
    _set(config.optimizer, {"lr": 1.0, "min_lr": 1.0, "adam_eps": 1.0})
    _set(config.scheduler, {"lr_warmup_iters": 0, "lr_decay_iters": ITERATIONS})
    _set(config.checkpoint, {"save": None, "load": None, "pretrained_checkpoint": str(folder)})
    _set(config.dist, {"distributed_backend": "gloo"})
    _set(config.logger, {"log_interval": 1, "tensorboard_dir": None})
    _set(config.comm_overlap, {"tp_comm_overlap": False})
    if hybrid:
        _set(config.comm_overlap, {"overlap_param_gather_with_optimizer_step": False})
        _set(config.optimizer, {"overlap_param_gather_with_optimizer_step": False})
    return config


_MODEL = {
    "seq_length": 32,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 2,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "sequence_parallel": False,
    "pipeline_dtype": torch.float32,
    "cross_entropy_loss_fusion": False,
    "moe_router_fusion": False,
    "moe_permute_fusion": False,
    "moe_router_force_load_balancing": False,
}
"""Fusions are kernels of a GPU; forced balance draws experts at random, in the order of a schedule."""


def _set(part: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        assert hasattr(part, name), name
        setattr(part, name, value)


def draw_adapters(chunks: list[Any]) -> None:
    """By their names: Bridge draws them by a state that stages' own weights have left behind."""
    for chunk in chunks:
        for name, weight in chunk.named_parameters():
            if ".adapter." in name:
                random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                weight.data.copy_(torch.randn(weight.shape, generator=random) / 10)


def _record(folder: Path) -> Any:
    """What Bridge calls during the training, with what it has found."""
    callback = importlib.import_module("megatron.bridge.training.callbacks").Callback
    bridge = importlib.import_module("megatron.bridge").AutoBridge.from_hf_pretrained(folder)
    unwrap = importlib.import_module("megatron.core.utils").unwrap_model
    partitioned = importlib.import_module("megatron_vocabpar.pipeline.model.stage_model").PartitionedModel

    def exported(context: Any, **options: Any) -> dict[str, np.ndarray]:
        weights = bridge.export_hf_weights(context.model, show_progress=False, **options)
        return {str(name): np.array(weight.detach()) for name, weight in weights}

    class Record(callback):
        def __init__(self) -> None:
            self.found: dict[str, Any] = {"losses": [], "norms": [], "evaluations": [], "weights": []}

        def on_train_start(self, context: Any) -> None:
            self.found["weights"].append(exported(context))
            self.found["partitioned"] = [isinstance(unwrap(chunk), partitioned) for chunk in context.model]
            self.tasks = bridge.get_conversion_tasks(context.model)
            draw_adapters(context.model)

        def on_train_step_end(self, context: Any) -> None:
            self.found["losses"] += [float(value) for value in context.loss_dict.values()]
            self.found["norms"].append(float(context.grad_norm))

        def on_eval_end(self, context: Any) -> None:
            self.found["evaluations"] += [float(value) for value in context.total_loss_dict.values()]

        def on_train_end(self, context: Any) -> None:
            self.found["weights"].append(exported(context))
            self.found["by tasks"] = exported(context, conversion_tasks=self.tasks)
            bridge.save_hf_weights(context.model, folder / "saved", show_progress=False)

    return Record()
