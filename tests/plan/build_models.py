"""Builds models of launch lines with a Megatron-LM checkout, beside torch on the CPU.

``python build_models.py CHECKOUT [FOLDER]`` reads a JSON object a line, ``{"name": ..., "argv": [...]}`` with
Megatron's words, builds each model in a fork of itself, and prints ``{"name": ..., "parameters": ...,
"config": {...}}``, or what went wrong as ``"error"``. With FOLDER, Transformer Engine's Python from there
makes the layers.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from megatron_vocabpar.train import on_cpu
from tests.transformer_engine import hook

_SAID = (
    "window_size", "window_attn_skip_freq", "qk_layernorm", "gated_linear_unit", "add_bias_linear",
    "add_qkv_bias", "moe_router_score_function", "moe_router_enable_expert_bias", "mtp_num_layers",
    "normalization", "moe_router_topk_scaling_factor",
)  # fmt: skip


def build(argv: list[str]) -> dict[str, Any]:
    """The number of parameters of the model that pretrain_gpt.py builds, and its configuration."""
    sys.argv = ["pretrain_gpt.py", *argv]
    core = importlib.import_module("megatron.core")
    arguments = importlib.import_module("megatron.training.arguments")
    training = importlib.import_module("megatron.training.global_vars")
    script = importlib.import_module("pretrain_gpt")
    args = arguments.parse_args()
    arguments.validate_args(args, {"tokenizer_type": "NullTokenizer"})
    args.padded_vocab_size = args.vocab_size + 1
    training.set_args(args)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    core.parallel_state.initialize_model_parallel()
    core.tensor_parallel.model_parallel_cuda_manual_seed(1)
    try:
        builder = importlib.import_module("gpt_builders").gpt_builder
        model = importlib.import_module("model_provider").model_provider(builder)
    except ModuleNotFoundError:
        model = script.model_provider()
    said = {name: getattr(model.config, name, None) for name in _SAID}
    activation = getattr(model.config.activation_func, "__name__", "")
    return {
        "parameters": sum(one.numel() for one in model.parameters()),
        "config": said | {"activation": activation},
    }


def main() -> None:
    sys.path.insert(0, sys.argv[1])
    os.environ |= {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    on_cpu.stand_in()
    for folder in sys.argv[2:]:
        hook.install(Path(folder))
    cpu = importlib.import_module("megatron_vocabpar.train.cpu")  # imports Megatron
    on_cpu.name_what_is_missing()
    for name in ("megatron.training.arguments", "pretrain_gpt"):
        importlib.import_module(name)
    for line in sys.stdin:
        job = json.loads(line)
        sys.stdout.flush()
        if os.fork() == 0:
            try:
                with cpu.megatron_on_cpu():
                    result = build(job["argv"])
            except (Exception, SystemExit):
                result = {"error": traceback.format_exc()[-3000:]}
            print("\n" + json.dumps({"name": job["name"], **result}), flush=True)
            os._exit(0)
        os.wait()


if __name__ == "__main__":
    main()
