"""One iteration of ms-swift's own jobs, megatron sft and megatron rlhf, on this rank; on the CPU.

What stands in for something else: ``train/on_cpu.py``'s answers for CUDA; the stand-in of Transformer
Engine's compiled part (``tests/transformer_engine``); ``tests/gathered_attention.py``, as that part has no
attention of packed sequences, which ms-swift makes.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np

from megatron_vocabpar.train import on_cpu
from tests.frameworks.compare import counting_rows
from tests.transformer_engine import hook

_FLAGS = (
    "--model_type qwen2 --template qwen --add_version false --use_hf true --torch_dtype float32 --fp16 false "
    "--pipeline_model_parallel_size 2 --micro_batch_size 2 --global_batch_size 6 --train_iters 1 "
    "--max_length 128 --lr 1 --min_lr 1 --lr_warmup_iters 0 --adam_eps 1 --attention_backend flash "
    "--ddp_backend gloo --check_model false --no_save_optim true --split_dataset_ratio 0 "
    "--load_from_cache_file false --dataloader_num_workers 0 --dataset_num_proc 1 --logging_steps 1 "
    "--cross_entropy_loss_fusion false --save_steps 1000"
)
_JOBS = {
    "sft": ("sft", "MegatronSft", ""),
    "dpo": ("rlhf", "MegatronRLHF", "--rlhf_type dpo --rpo_alpha 0.5"),
}


def write_data(folder: Path) -> None:
    """A tokenizer of letters, and six pairs of answers to questions, of which SFT takes the first."""
    tokenizers: Any = importlib.import_module("tokenizers")
    letters = [*map(chr, range(33, 127)), "Ġ", "Ċ"]  # the last two are space and new line
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({each: i for i, each in enumerate(letters)}, []))
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    importlib.import_module("transformers").PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    ).save_pretrained(folder)
    draw = random.Random(1)

    def text() -> str:
        return "".join(draw.choices("abcdefghij ", k=draw.randrange(3, 9)))

    def talk() -> dict[str, Any]:
        messages = [{"role": role, "content": text()} for role in ("user", "assistant")]
        return {"messages": messages, "rejected_response": text()}

    pairs = [talk() for _ in range(6)]
    (folder / "dpo.jsonl").write_text("\n".join(json.dumps(pair) for pair in pairs))
    (folder / "sft.jsonl").write_text("\n".join(json.dumps({"messages": pair["messages"]}) for pair in pairs))


def step(rank: int, job: str, flags: str, plugin: Path | None, folder: Path) -> dict[str, Any]:
    """Metrics, gradients and rows of the output layer, and weights of this rank before and after it.

    Arrays: Megatron's tensors need Megatron to be unpickled.

    Args:
        job: ``sft`` or ``dpo``.
        plugin: the file that ms-swift is given; None trains with Megatron's own schedules.
        folder: of the checkpoint to start from; it gets ``saved``, another one, before the update.
    """
    environment = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": 2,
        "LOCAL_WORLD_SIZE": 2,
        "HF_HUB_OFFLINE": 1,
    }
    os.environ |= {name: str(value) for name, value in environment.items()}
    on_cpu.stand_in()
    wheel = hook.wheel()
    assert wheel is not None, hook.MISSING
    hook.install(wheel)
    sys.path.insert(0, os.environ["MEGATRON_LM_PATH"])
    on_cpu.skip_compilation()
    on_cpu.name_what_is_missing()
    cpu = importlib.import_module("megatron_vocabpar.train.core_on_cpu")
    with cpu.megatron_on_cpu():
        layers: Any = importlib.import_module("megatron.core.extensions.transformer_engine_spec_provider")
        attention = importlib.import_module("tests.gathered_attention").GatheredAttention
        layers.TESpecProvider.core_attention = lambda _: attention
        return _step(job, flags, plugin, folder)


def _step(job: str, flags: str, plugin: Path | None, folder: Path) -> dict[str, Any]:
    module, name, own = _JOBS[job]
    made = getattr(importlib.import_module(f"swift.megatron.pipelines.train.{module}"), name)
    files = f"--model {folder} --dataset {folder / job}.jsonl --output_dir {folder / 'out'}"
    line = f"{files} {_FLAGS} {own} {flags} {f'--external_plugins {plugin}' if plugin else ''}"
    running = made(line.split())
    args = running.args
    args.callbacks = ["default_flow"]  # no tensorboard
    data, _ = running._prepare_dataset()
    args.init_iters(data, None)
    trainer = running.prepare_trainer()
    models = trainer.unwrapped_models
    weights = [_exported(trainer)]
    trainer.bridge.save_weights(models, str(folder / "saved"))
    rows = counting_rows(models[0])
    gradients: dict[str, np.ndarray] = {}
    update = trainer.optimizer.step

    def watched_update() -> Any:
        for name, parameter in models[0].named_parameters():
            gradients[name] = parameter.main_grad.numpy().copy()
        return update()

    trainer.optimizer.step = watched_update
    metrics: dict[str, float] = {}
    trainer.call_event = lambda event, logs=None, **_: metrics.update(logs or {})
    iterators = trainer.setup_training(data, None)
    trainer.state.should_log = True
    trainer.run_train_step(*iterators)
    weights.append(_exported(trainer))
    metrics = {name: float(value) for name, value in metrics.items() if value is not None}
    return {"metrics": metrics, "gradients": gradients, "rows": rows, "weights": weights}


def _exported(trainer: Any) -> dict[str, np.ndarray]:
    weights = trainer.bridge.export_weights(trainer.unwrapped_models)
    return {name: weight.numpy().copy() for name, weight in weights if weight is not None}
