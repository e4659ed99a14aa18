"""One step of slime's actor on this rank: its own model, data, log-probabilities, loss, update; on the CPU.

What stands in for something else: ``train/on_cpu.py``'s answers for CUDA; an attention that takes packed
sequences (``tests/gathered_attention.py``) and layers with norms (``tests/normed_layers.py``) for Transformer
Engine's; sglang's arguments and functions, which nobody asks for; a version of NumPy that slime takes.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from megatron_vocabpar.train import on_cpu
from tests.frameworks.compare import counting_rows
from tests.frameworks.hugging_face import FFN, HEADS, HIDDEN, LAYERS, VOCABULARY, is_tied

TOTAL = (9, 12, 7, 16, 11, 8)
"""Tokens of the samples, two a microbatch."""

_FLAGS = (
    f"--num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads {HEADS} --ffn-hidden-size {FFN} "
    f"--group-query-attention --num-query-groups {HEADS} --seq-length 64 --max-position-embeddings 64 "
    "--position-embedding-type rope --normalization RMSNorm "
    "--swiglu --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --transformer-impl local "
    "--micro-batch-size 1 --global-batch-size 6 --lr 1 --adam-eps 1 "
    "--no-persist-layer-norm --no-gradient-accumulation-fusion --no-bias-swiglu-fusion --no-rope-fusion "
    "--no-masked-softmax-fusion --tokenizer-type NullTokenizer --pipeline-model-parallel-size 2 "
    f"--vocab-size {VOCABULARY} --make-vocab-size-divisible-by 2 --add-qkv-bias --norm-epsilon 1e-5 "
    "--num-rollout 1 --rollout-batch-size 3 --n-samples-per-prompt 2 --actor-num-gpus-per-node 2 "
    "--data-pad-size-multiplier 8 --debug-train-only --eps-clip-high 0.28"
)


def step(rank: int, flags: str, responses: tuple[int, ...], ours: bool, folder: Path) -> dict[str, Any]:
    """Log-probabilities of the rollout, metrics and gradients of the update, and weights of this rank.

    Args:
        responses: tokens of each sample's response.
        folder: of the checkpoint to start from; it gets ``saved``, another one, before the update.
    """
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    sys.path[:0] = [os.environ["SLIME_PATH"], os.environ["MEGATRON_LM_PATH"]]
    checkpoint = f"--load {folder} --hf-checkpoint {folder}"
    if not is_tied(folder):
        checkpoint += " --untie-embeddings-and-output-weights"
    sys.argv = ["train.py", *_FLAGS.split(), *flags.split(), *checkpoint.split()]
    on_cpu.stand_in()
    on_cpu.skip_compilation()
    on_cpu.name_what_is_missing()
    cpu = importlib.import_module("megatron_vocabpar.train.core_on_cpu")
    with cpu.megatron_on_cpu():
        return _step(responses, _arguments(rank, ours), folder)


def _arguments(rank: int, ours: bool) -> Any:
    for name in ("arguments", "external"):
        module: Any = types.ModuleType(f"slime.backends.sglang_utils.{name}")
        module.sglang_parse_args = module.validate_args = module.apply_external_engine_info_to_args = None
        sys.modules[module.__name__] = module
    sys.modules["slime.backends.megatron_utils.sglang"] = mock.MagicMock()
    provider = importlib.import_module("slime.utils.arguments").get_slime_extra_args_provider()
    arguments = importlib.import_module("slime.backends.megatron_utils.arguments")
    args = arguments.megatron_parse_args(provider)
    args.bf16, args.rank = False, rank
    arguments.validate_args(args)
    args.custom_megatron_init_path = "megatron_vocabpar.frameworks.door.init" if ours else None
    return args


def _step(responses: tuple[int, ...], args: Any, folder: Path) -> dict[str, Any]:
    backends: Any = importlib.import_module("megatron.core.models.backends")
    backends.DotProductAttention = importlib.import_module("tests.gathered_attention").GatheredAttention
    layers = importlib.import_module("tests.normed_layers").layer_spec
    vars(importlib.import_module("megatron.core.models.gpt.gpt_layer_specs"))["get_gpt_layer_local_spec"] = (
        layers
    )
    loss = importlib.import_module("slime.backends.megatron_utils.loss")
    model = importlib.import_module("slime.backends.megatron_utils.model")
    data = importlib.import_module("slime.backends.megatron_utils.data")
    with mock.patch.object(np, "__version__", "1.26.4"):  # slime refuses NumPy 2
        importlib.import_module("slime.backends.megatron_utils.initialize").init(args)
    chunks, optimizer, scheduler = model.setup_model_and_optimizer(args)
    weights = _Weights(args, chunks, optimizer)
    sent = [weights.sent()]
    weights.save(folder / "saved")
    rollout, rows = _rollout(responses), counting_rows(chunks[0].module)
    iterators = data.get_data_iterator(rollout)
    results = model.forward_only(
        loss.get_log_probs_and_entropy, args, chunks, iterators, rollout["num_microbatches"]
    )
    loss.compute_advantages_and_returns(args, rollout)  # GRPO's
    gradients: dict[str, torch.Tensor] = {}
    update = optimizer.step

    def watched_update() -> Any:
        for name, parameter in chunks[0].named_parameters():
            gradients[name] = parameter.main_grad.clone()
        return update()

    optimizer.step = watched_update
    metrics: dict[str, float] = {}
    model.logging_utils.log = lambda args, values, **_: metrics.update(values)
    model.train(
        0, chunks, optimizer, scheduler, iterators, rollout["num_microbatches"], rollout["global_batch_sizes"]
    )
    sent.append(weights.sent())
    weights.backups.restore("actor")
    sent.append(weights.sent())
    found = {"results": results, "metrics": metrics, "gradients": gradients}
    return found | {"rows": rows, "weights": sent}


class _Weights:
    """What slime's actor does with weights: loads from Hugging Face, backs up, restores, sends and saves."""

    def __init__(self, args: Any, chunks: Any, optimizer: Any) -> None:
        self._args, self._chunks = args, chunks
        importlib.import_module("slime.utils.distributed_utils").init_gloo_group()
        package = "slime.backends.megatron_utils"
        importlib.import_module(f"{package}.checkpoint").load_checkpoint(chunks, optimizer, None, {}, False)
        walk = importlib.import_module(f"{package}.update_weight.common").named_params_and_buffers
        backups = importlib.import_module("slime.utils.tensor_backper").TensorBackuper
        self.backups = backups.create(source_getter=lambda: walk(args, chunks), single_tag=None)
        self.backups.backup("actor")
        module = importlib.import_module(f"{package}.update_weight.update_weight_from_distributed")
        self._update: Any = module.UpdateWeightFromDistributed(
            args, chunks, None, model_name="qwen2", quantization_config=None
        )
        self._update._is_pp_src_rank = True

    def sent(self) -> dict[str, torch.Tensor]:
        """What this rank would send to the rollout's engines."""
        found = (pair for bucket in self._update._iter_non_expert_chunks() for pair in bucket)
        return {name: value.clone() for name, value in found}

    def save(self, folder: Path) -> None:
        saver = importlib.import_module("slime.backends.megatron_utils.hf_checkpoint_saver")
        saver.save_hf_model_to_path(self._args, folder, self._chunks)


def _rollout(responses: tuple[int, ...]) -> dict[str, Any]:
    """What the rollout workers would have sent: the same on all ranks."""
    random = torch.Generator().manual_seed(1)

    def per_response(make: Any) -> list[torch.Tensor]:
        return [make(response) for response in responses]

    masks = per_response(lambda n: (torch.rand(n, generator=random) < 0.9).int())
    return {
        "tokens": [torch.randint(VOCABULARY, (total,), generator=random) for total in TOTAL],
        "total_lengths": list(TOTAL),
        "response_lengths": list(responses),
        "loss_masks": masks,
        "rollout_mask_sums": [mask.sum() for mask in masks],
        "rewards": torch.randn(len(responses), generator=random).tolist(),
        "log_probs": per_response(lambda n: -5 + torch.randn(n, generator=random) / 2),
        "ref_log_probs": per_response(lambda n: -5 + torch.randn(n, generator=random) / 2),
        "micro_batch_indices": [[0, 1], [2, 3], [4, 5]],
        "num_microbatches": [3],
        "global_batch_sizes": [6],
    }
