"""The launch line of an experiment: torchrun, the script of a Megatron-LM checkout, its arguments.

For CPU processes, only the entry and a few flags differ. Next: ``runner.py``.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lab.paper.experiments import Experiment
from megatron_vocabpar.schedule.make.families import family_named

_ADDS_AN_ID = ("0.14", "0.15", "0.16", "0.17")  # to --vocab-size: the NullTokenizer's end of a document
_REPORTS_MEMORY_ONCE = ("0.14", "0.15")

_TRAINING = shlex.split(
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.006 "
    "--min-lr 0 --lr-decay-style cosine --lr-warmup-iters 2 --clip-grad 8.0 --weight-decay 0.1 "
    "--adam-beta1 0.9 --adam-beta2 0.95 --seed 1234 --tokenizer-type NullTokenizer --split 100,0,0 "
    "--no-create-attention-mask-in-dataloader --log-interval 1 --log-throughput "
    "--eval-interval 1000000 --eval-iters 0"
)
_GPU = shlex.split("--bf16 --use-distributed-optimizer")
_CPU = shlex.split(
    "--distributed-backend gloo --num-workers 0 --transformer-impl local --no-gradient-accumulation-fusion "
    "--no-masked-softmax-fusion --no-persist-layer-norm --no-bias-gelu-fusion --no-bias-swiglu-fusion "
    "--no-bias-dropout-fusion --no-rope-fusion"
)


@dataclass(frozen=True)
class Nodes:
    """A job's machines: how many, this one's number, and the address of node 0, where they meet."""

    count: int = 1
    rank: int = 0
    address: str = "localhost"
    port: int = 29500

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Nodes:
        """From ``NNODES``, ``NODE_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT``, or Slurm's own variables."""

        def number(default: int, *names: str) -> int:
            for name in names:
                if name in environment:
                    if not environment[name].isdigit():
                        raise ValueError(f"{name}={environment[name]!r} is not a number")
                    return int(environment[name])
            return default

        count = number(1, "NNODES", "SLURM_NNODES")
        if count > 1 and "MASTER_ADDR" not in environment:
            raise ValueError(f"{count} nodes need MASTER_ADDR, the name of node 0's machine")
        return cls(
            count,
            number(0, "NODE_RANK", "SLURM_NODEID"),
            environment.get("MASTER_ADDR", "localhost"),
            number(29500, "MASTER_PORT"),
        )


def method_arguments(experiment: Experiment) -> list[str]:
    """The flags of method and family; none for stock Megatron."""
    chunks = family_named(experiment.family).chunks
    virtual = ["--num-virtual-stages-per-pipeline-rank", str(chunks)] if chunks > 1 else []
    if experiment.method == "baseline" and experiment.family == "1f1b":
        return []
    return [
        *("--enable-vocab-parallel", "--vocab-parallel-method", experiment.method),
        *("--vocab-parallel-family", experiment.family, *virtual),
    ]


def script_arguments(experiment: Experiment, data: Path, version: str, on_cpu: bool) -> list[str]:
    """Arguments of ``pretrain_gpt.py``.

    Args:
        data: path of the indexed dataset, without ``.bin`` and ``.idx``.
        version: the checkout's version, as ``version_of`` gives it.
        on_cpu: the arguments are for CPU processes, in float32.
    """
    ids = experiment.vocab_size - (version in _ADDS_AN_ID)
    sizes = {
        "--num-layers": experiment.layers,
        "--hidden-size": experiment.hidden,
        "--num-attention-heads": experiment.heads,
        "--seq-length": experiment.seq_length,
        "--max-position-embeddings": experiment.seq_length,
        "--micro-batch-size": experiment.micro_batch,
        "--global-batch-size": experiment.microbatches * experiment.micro_batch,
        "--pipeline-model-parallel-size": experiment.gpus // experiment.tp,
        "--tensor-model-parallel-size": experiment.tp,
        "--train-iters": experiment.iterations,
        "--lr": experiment.lr,
        "--vocab-size": ids,
        "--data-path": data,
        "--data-cache-path": data.parent / "index",
    }
    return [
        *(str(word) for pair in sizes.items() for word in pair),
        *_TRAINING,
        *(_CPU if on_cpu else _GPU),
        *(["--sequence-parallel"] if experiment.tp > 1 else []),
        *([] if version in _REPORTS_MEMORY_ONCE else ["--log-memory-interval", "1"]),
        *method_arguments(experiment),
    ]


def launch_line(
    experiment: Experiment, checkout: Path, data: Path, version: str, nodes: Nodes, on_cpu: bool
) -> list[str]:
    """The command that runs this node's part of an experiment; arguments as ``script_arguments``."""
    if experiment.gpus % nodes.count:
        raise ValueError(f"{experiment.name}: {nodes.count} nodes cannot share {experiment.gpus} GPUs evenly")
    rendezvous = (
        ["--standalone"]
        if nodes.count == 1
        else [
            *("--nnodes", str(nodes.count), "--node-rank", str(nodes.rank)),
            *("--master-addr", nodes.address, "--master-port", str(nodes.port)),
        ]
    )
    entry = "megatron_vocabpar.train.on_cpu" if on_cpu else "megatron_vocabpar.launch"
    return [
        *(sys.executable, "-m", "torch.distributed.run", *rendezvous),
        *("--nproc-per-node", str(experiment.gpus // nodes.count)),
        *("-m", "lab.paper.rank", entry),
        str(checkout / "pretrain_gpt.py"),
        *script_arguments(experiment, data, version, on_cpu),
    ]
