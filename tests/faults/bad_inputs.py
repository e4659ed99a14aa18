# ruff: noqa: E501
# fmt: off
"""Input that no verb can use: flags, files and numbers, by verb."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Content = str | bytes | None
"""Of a file; None makes a folder."""


@dataclass(frozen=True)
class BadInput:
    """What is typed, and a regular expression for what must be said to it.

    Attributes:
        name: verb, then what is wrong.
        arguments: after ``vocabpar``, or from ``lab`` on; ``{}`` in them is a folder, whose files ``files`` are.
        says: is searched in the one message.
        code: the exit code.
    """

    name: str
    arguments: str
    says: str
    files: Mapping[str, Content] = field(default_factory=dict)
    code: int = 2


DEEP = "[" * 100_000
JUNK: dict[str, Content] = {
    "missing-file": "", "empty": "", "no-json": "{", "deep": DEEP, "binary": b"\xff\xfe\0", "list": "[]", "number": "7",
    "null": "null", "folder": None,
}  # fmt: skip


def junk(verb: str, arguments: str, says: str = "x.json", but: tuple[str, ...] = ()) -> Iterator[BadInput]:
    """Files that hold nothing that any verb could read; ``arguments`` names ``{}/x.json``."""
    for name, content in JUNK.items():
        if name not in but:
            files = {} if name == "missing-file" else {"x.json": content}
            yield BadInput(f"{verb}-{name}", arguments, says, files)


def changed(data: Mapping[str, Any], **changes: Any) -> str:
    return json.dumps({**data, **changes})


COSTS = {"F_ms": 10, "B_ms": 12, "W_ms": 8, "methods": {"vocab-2": {"S_ms": 1, "T_ms": 1}}}


def schedule() -> Iterator[BadInput]:
    for flags, says in {
        "--pp 0": "pipeline size 0 is below 1", "--pp -1": "p", "--pp 1.5": "--pp", "--pp x": "--pp", "--microbatches 0": "0 microbatches is below 1",
        "--microbatches -5": "microbatch", "--microbatches 99999999999": "microbatch|large|more than", "--pp 256 --microbatches 4096": "1,048,576 forward passes, more than 262,144; use fewer",
        "--pp 100000 --microbatches 1": "100000 ranks x 1 chunks are 100,000 stages, more than 2,048; use fewer",
        "--family search --pp 10000000 --microbatches 1": "stages, more than 2,048; use fewer",
        "--method vocab2": "unknown method 'vocab2'", "--method ''": "method", "--family x": "unknown family 'x'", "--chunks 0": "chunk", "--chunks -1": "chunk",
        "--chunks 1000": "chunk", "--family interleaved --chunks 1000": "1000 chunks per rank is above 64; use fewer",
        "--max-activations 0.5": "max_activations is 0.5",
        "--max-activations nan": "max_activations is nan", "--max-activations -1": "max|activation|hold", "--family v-half --chunks 3": "chunk",
        "--format x": "format", "--check x": "--check", "--width 5": "--width",
        "--output {}": "cannot write", "--output {}/no/where": "cannot write", "--output /dev/full": "cannot write",
        "--nonsense": "nonsense", "extra": "extra", "--costs": "--costs", "--format svg --output /proc/x": "cannot write",
    }.items():  # fmt: skip
        yield BadInput(f"schedule {flags}", f"schedule {flags}", says)
    yield from junk("costs", "schedule --pp 2 --costs {}/x.json")
    yield BadInput("schedule costs nowhere", "schedule --costs {}/none.json", "cannot read costs from .*none.json")
    milliseconds = "give milliseconds"
    for name, (text, says) in {
        "list": ("[]", "must hold one JSON object"), "nothing": ("{}", "F_ms is missing; give one JSON object with F_ms, B_ms and W_ms"),
        "negative": (changed(COSTS, F_ms=-1), f"F_ms is -1; {milliseconds}"), "text": (changed(COSTS, F_ms="1"), milliseconds),
        "none": (changed(COSTS, F_ms=None), milliseconds), "infinite": ('{"F_ms": Infinity}', "Infinity is no number in JSON"),
        "nan": (changed(COSTS).replace("10", "NaN"), "NaN is no number in JSON"), "huge": (changed(COSTS, F_ms=1e308), r"F_ms is 1e\+308; give milliseconds from 0 to 1e7"),
        "three-ranks": (changed(COSTS, F_ms=[1, 2, 3]), "F_ms lists 3 ranks, but the pipeline has 2; give one number or 2"),
        "text-rank": (changed(COSTS, F_ms=[1, "x"]), rf"F_ms is \[1, 'x'\]; {milliseconds}"), "nested": (changed(COSTS, F_ms=[[1], [2]]), milliseconds),
        "truth": (changed(COSTS, F_ms=True), milliseconds), "unknown": (changed(COSTS, p2p=1), "unknown entry 'p2p'; there are source"),
        "unknown-method": (changed(COSTS, methods={"x": {}}), "unknown (method|entry) 'x'"), "no-method": (changed(COSTS, methods={"vocab-1": {}}), "the costs have no times for 'vocab-2'"),
        "empty-method": (changed(COSTS, methods={"vocab-2": {}}), "the costs have no S_ms for 'vocab-2'; add it under 'methods'"),
        "method-list": (changed(COSTS, methods={"vocab-2": []}), "methods"), "methods-list": (changed(COSTS, methods=[]), r"methods is \[\]; give for each method its times"),
        "unknown-pass": (changed(COSTS, methods={"vocab-2": {"s_ms": 1}}), r"unknown entry 's_ms' in methods.vocab-2; there are S_ms"),
        "extra-of-unknown": (changed(COSTS, baseline_last_rank_extra={"X_ms": 1}), "X_ms"),
        "memory": (changed(COSTS, memory_mib={"x": 1}), "unknown entry 'x' in memory_mib; there are activations"),
        "big-integer": (changed(COSTS).replace("10", "9" * 5000), "x.json"), "empty-list": (changed(COSTS, F_ms=[]), "F_ms"),
        "shape-text": (changed(COSTS, seq_length="x"), "seq_length"), "shape-negative": (changed(COSTS, seq_length=-4, hidden=8, layers=2, vocab=9), "seq_length"),
        "transfer-text": (changed(COSTS, p2p_ms="x"), milliseconds), "two-keys": ('{"F_ms": 1, "F_ms": 2}', "F_ms"),
    }.items():  # fmt: skip
        yield BadInput(f"costs-{name}", "schedule --pp 2 --costs {}/x.json", f"^vocabpar schedule: error: .*{says}", {"x.json": text})


def made_schedule() -> dict[str, Any]:
    from megatron_vocabpar.schedule.make.generate import generate
    from megatron_vocabpar.schedule.serialize import to_json

    return json.loads(to_json(generate("vocab-2", 2, 2)))


def simulate() -> Iterator[BadInput]:
    yield from junk("simulate", "simulate {}/x.json")
    good = made_schedule()
    for key in good:
        for name, value in {"null": None, "text": "x", "negative": -1, "huge": 10**9, "list": [[["x"]]]}.items():
            yield BadInput(
                f"simulate-{key}-{name}",
                "simulate {}/x.json",
                "x.json|schedule|chunk|rank|method|microbatch",
                {"x.json": changed(good, **{key: value})},
            )
        missing = json.dumps({k: v for k, v in good.items() if k != key})
        if key != "method":  # is found from the passes
            yield BadInput(f"simulate-without-{key}", "simulate {}/x.json", key, {"x.json": missing})
    text = json.dumps(good)
    whole = {"x.json": text}
    yield BadInput("simulate-cap-nan", "simulate {}/x.json --max-activations nan", "max_activations is nan; a rank holds at least 1", whole)
    yield BadInput("simulate-cap-small", "simulate {}/x.json --max-activations 1", "peak over the cap", whole)
    yield BadInput("simulate-costs-nowhere", "simulate {}/x.json --costs {}/none.json", "cannot read costs", whole)
    yield BadInput("simulate-html-nowhere", "simulate {}/x.json --html {}/no/x.html", "cannot write .*x.html.*--html", whole)
    yield BadInput("simulate-format", "simulate {}/x.json --format x", "--format", whole)
    yield BadInput("simulate-no-file", "simulate", "SCHEDULE")
    for name, content in {
        "junk": "{", "list": "[]", "deep": DEEP, "no-events": "{}", "empty-events": '{"traceEvents": []}', "binary": b"\xff",
        "other-events": '{"traceEvents": [{"ph": "X", "name": "x", "tid": 0, "ts": 0, "dur": 1, "cat": "c"}]}',
        "text-times": '{"traceEvents": [{"ph": "X", "name": "0F0", "tid": 0, "ts": "a", "dur": 1, "cat": "F"}]}',
        "nan-times": '{"traceEvents": [{"ph": "X", "name": "0F0", "tid": 0, "ts": NaN, "dur": NaN, "cat": "F"}]}',
        "null-events": '{"traceEvents": null}', "folder": None,
    }.items():  # fmt: skip
        yield BadInput(f"timeline-{name}", "simulate {}/x.json --measured {}/t.json", "t.json", {**whole, "t.json": content})
    yield BadInput("timeline-missing", "simulate {}/x.json --measured {}/t.json", "t.json", whole)


MODEL = {
    "vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128,
    "model_type": "llama",
}  # fmt: skip
ARGUMENTS = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 1000"


def plan() -> Iterator[BadInput]:
    for flags, says in {
        "": "nothing given for the model; give one of", "--preset x": "--preset x: choose one of gemma-2-9b", "--preset gemma-2-9b --hardware V100": "choose one of A100, H100, H200, H800",
        "--preset gemma-2-9b --pp 0": "pp|pipeline", "--preset gemma-2-9b --tp 0": "tp|tensor", "--preset gemma-2-9b --dp 0": "dp|data",
        "--preset gemma-2-9b --ep 3": "expert parallel size 3 does not divide d x t x c = 1 x 1 x 1 = 1; choose 1", "--preset gemma-2-9b --microbatches 0": "microbatch",
        "--preset llama-3.2-3b --pp 4 --microbatches 60000": "480,000 forward passes, more than 262,144; use fewer",
        "--preset gemma-2-9b --micro-batch-size 0": "micro", "--preset gemma-2-9b --seq-length 0": "--seq-length 0",
        "--preset gemma-2-9b --memory-gib nan": "memory-gib", "--preset gemma-2-9b --memory-gib -1": "memory-gib",
        "--preset gemma-2-9b --memory-gib inf": "memory-gib",
        "--preset gemma-2-9b --pp x": "--pp", "--preset gemma-2-9b --pp 1000": "pp|pipeline|layers", "--preset gemma-2-9b --config y": "--preset and --config given for the model; give one of",
        "--preset gemma-2-9b --costs /dev/zero": "more than 256 MiB", f"-- {ARGUMENTS.replace('layers 4', 'layers 1000000000')}": "at most 4,096",
        "--preset gemma-2-9b --costs {}/none.json": "none.json", "--script {}/none.sh": "none.sh", "--config {}/none.json": "none.json",
        f"-- {ARGUMENTS.replace('64', '0')}": "whole number", f"-- {ARGUMENTS.replace('--vocab-size 1000', '')}": "--vocab-size",
        f"-- {ARGUMENTS} --num-experts x": "--num-experts", "-- --num-layers": "no --hidden-size|whole number",
        f"-- {ARGUMENTS.replace('1000', '9' * 5000)}": "vocab-size", f"-- {ARGUMENTS.replace('layers 4', 'layers ４')}": "whole number",
    }.items():  # fmt: skip
        yield BadInput(f"plan {flags[:60]}", f"plan {flags}", says)
    yield from junk("plan-config", "plan --config {}/x.json")
    for name, changes in {
        "no-size": {"hidden_size": None}, "zero": {"hidden_size": 0}, "text": {"vocab_size": "x"}, "float": {"num_hidden_layers": 1.5},
        "truth": {"num_attention_heads": True}, "negative": {"intermediate_size": -1}, "experts-text": {"num_experts": "x", "num_experts_per_tok": 2},
        "layers": {"num_hidden_layers": 10**9}, "unread": {"num_new_experts": 4}, "kind": {"model_type": "llama5"}, "no-kind": {"model_type": None},
        "position-text": {"max_position_embeddings": "x"}, "position-zero": {"max_position_embeddings": 0}, "text-config": {"text_config": 5},
        "window-text": {"sliding_window": "x", "use_sliding_window": True}, "types-number": {"sliding_window": 5, "layer_types": 7},
        "pattern-text": {"sliding_window": 5, "sliding_window_pattern": "x"}, "lora-text": {"kv_lora_rank": "x"},
        "frequency-text": {"num_experts": 4, "num_experts_per_tok": 2, "moe_layer_freq": "x"},
        "no-offset": {"model_type": "jamba", "attn_layer_period": 8, "mamba_d_state": 16}, "period-text": {"model_type": "jamba", "attn_layer_period": "x", "attn_layer_offset": 0, "mamba_d_state": 16},
        "pattern-list": {"sliding_window": 5, "sliding_window_pattern": [1]}, "end-text": {"num_experts": 4, "num_experts_per_tok": 2, "moe_layer_start_index": 1, "moe_layer_end_index": "x"},
        "shared-text": {"num_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": "x"},
    }.items():  # fmt: skip
        yield BadInput(f"plan-config-{name}", "plan --pp 2 --microbatches 4 --config {}/x.json", "x.json", {"x.json": changed(MODEL, **changes)})
    yield BadInput("plan-script-binary", "plan --script {}/x.sh", "x.sh", {"x.sh": b"\xff\0"})
    yield BadInput("plan-script-folder", "plan --script {}/x.sh", "x.sh", {"x.sh": None})
    yield BadInput("plan-script-empty", "plan --script {}/x.sh", "no command has Megatron's arguments", {"x.sh": ""})


def paper() -> Iterator[BadInput]:
    header = "method,pipeline,num_microbatches,seq_length,hidden,vocab,layers,iteration_ms,F_us_per_rank,B_us_per_rank,output_us_per_rank,IF_us_per_rank,IB_us_per_rank,comm_us\n"
    row = "vocab-2,2,4,64,64,1000,4,10,1 1,1 1,1 1,1 1,1 1,1\n"
    yield from (replace_file(bad, "x.csv") for bad in junk("paper", "lab paper --measured {}/x.csv", "x.csv", but=("null", "number", "list")))
    for name, (text, says) in {
        "header-alone": (header, "give a line each"), "other-header": ("a,b\n1,2\n", "line 1: no column 'method'"),
        "method": (header + row.replace("vocab-2", "x"), "line 2, column 'method': 'x'; give one of baseline"),
        "zero": (header + row.replace(",2,4", ",0,4"), "column 'pipeline': '0'; give a whole number of at least 1"),
        "text": (header + row.replace("64", "x"), "column 'seq_length': 'x'; give a whole number"), "short": (header + "vocab-2,2\n", "line 2: give 14 cells"),
        "long": (header + row.strip() + ",1,1,1,1\n", "line 2: give 14 cells"), "nan": (header + row.replace(",10,", ",nan,"), "column 'iteration_ms'"),
        "no-time": (header + row.replace(",10,", ",0,"), "column 'iteration_ms': '0'; give the measured milliseconds"),
        "ranks": (header + row.replace("1 1", "1 1 1", 1), "column 'F_us_per_rank': '1 1 1'; give 2 numbers, one a rank"), "zeros": (header + "\0\n", "x.csv"),
        "negative": (header + row.replace("1 1", "1 -1", 1), "column 'F_us_per_rank': '1 -1'; .* none below 0"),
        "no-transfer": (header + row.replace(",1\n", ",\n"), "column 'comm_us': ''; give one number"),
    }.items():  # fmt: skip
        yield BadInput(f"paper-{name}", "lab paper --measured {}/x.csv", says, {"x.csv": text})
    for flags, says in {
        "": "give --measured FILE.csv, or one of table3", "--measured {}/none.csv": "cannot read measured passes from .*none.csv", "x": "x", "figure17": "--losses", "table3 --output {}/x.svg": "--output is for a figure",
        "figure17 --losses {}/none.csv --output {}/x.svg": "none.csv", "table3 --losses {}/x.csv": "figure17", "figure10 --output {}/no/x.svg": "cannot write",
        "table3 --measured {}/x.csv": "give --measured",
    }.items():  # fmt: skip
        yield BadInput(f"paper {flags}", f"lab paper {flags}", says)
    for name, text in {"empty": "", "header": "a,b\n", "text": "method,iteration,loss\nvocab-2,1,x\n", "binary": b"\xff\0", "folder": None}.items():
        yield BadInput(f"losses-{name}", "lab paper figure17 --losses {}/x.csv --output {}/x.svg", "x.csv", {"x.csv": text})


def replace_file(bad: BadInput, name: str) -> BadInput:
    return BadInput(bad.name, bad.arguments, bad.says, dict.fromkeys([name] * len(bad.files), next(iter(bad.files.values()), "")), bad.code)


def train() -> Iterator[BadInput]:
    small = "train --device cpu --output {}/out"
    for flags, says in {
        "--pp 0": "--pp 0: give 1 or more", "--pp 9": "--pp 9 is larger than --layers 8; every stage needs a layer: give --pp 8 or fewer", "--pp": "--pp",
        "--pp 3": "--layers 8 cannot be divided over --pp 3 stages, which vocab-2 needs; give --layers 6 or 9", "--pp 3 --method redis --compare naive": "which naive needs",
        "--tp 3": "--heads 4 cannot be divided over --tp 3", "--tp 4 --ffn 30": "--ffn 30 cannot be divided over --tp 4", "--dp 0": "--dp 0",
        "--tp 2 --seq-length 31": "--seq-length 31 cannot be divided over --tp 2", "--microbatches 0": "--microbatches 0: give 1 or more",
        "--lr nan": "--lr nan: give a finite number", "--lr inf": "--lr inf", "--lr 0": "--lr 0.0: give more than 0", "--lr -1": "--lr -1",
        "--warmup -1": "--warmup -1", "--weight-decay nan": "--weight-decay", "--clip-grad -1": "--clip-grad", "--seed -1": "--seed -1: give 0 or more",
        "--seed 99999999999999999999999": "--seed", "--steps 0": "--steps 0", "--steps x": "--steps", "--hidden 65": "--hidden", "--heads 0": "--heads 0",
        "--heads 3": "--hidden 64 cannot be divided over --heads 3; give --hidden 66", "--position rope --heads 64": "--position rope needs an even size per head, not 1",
        "--position x": "--position", "--dtype fp8": "--dtype fp8: choose one of fp32, bf16", "--device tpu": "--device",
        "--device cuda": "--device cuda: this machine shows no CUDA device; give --device cpu", "--vocab-size 10": "too small for a byte-level tokenizer; give at least 257",
        "--vocab-size 300 --tokenizer-vocab-size 301": "--vocab-size 300 is smaller than the tokenizer's 301", "--tokenizer-vocab-size 5": "too small",
        "--method vocab2": "--method vocab2: choose one of baseline, redis, naive, vocab-1, vocab-2, interlaced; did you mean 'vocab-2'?", "--compare basline": "; did you mean 'baseline'?",
        "--method zzz": "--method zzz: choose one of baseline, redis, naive", "--compare ,,x": "--compare x: choose one of baseline",
        "--family vhalf": "--family vhalf: choose one of 1f1b, interleaved, v-half, v-min, ", "--family v-half --pp 1": "v-half has 2 model chunks on each rank, which need --pp 2",
        "--family interleaved --compare redis": "method redis: interleaved has 2 model chunks on each rank, and redis moves whole layers",
        "--family v-zb --tied --compare baseline": "cannot tie their weights; give --untied, or leave baseline out", "--chunks 0": "--chunks 0: give 1 or more",
        "--chunks 2": "--chunks 2: 1f1b has 1 on each rank; give --chunks 1, or leave it out", "--chunks 3 --family v-half": "chunk",
        "--chunks 1 --family interleaved": "interleaved has at least 2 on each rank; give --chunks 2",
        "--chunks 3 --family interleaved": "--layers 8 cannot be divided over --pp 4 × 3 chunks = 12 stages of interleaved; give",
        "--chunks 3 --family search": "--family search, method vocab-2: --layers 8 cannot be divided",
        "--chunks 2 --family search --method redis": "--family search, method redis: interleaved", "--max-activations 0.5": "--max-activations 0.5: give 1 or more",
        "--max-activations nan": "--max-activations", "--max-activations inf": "--max-activations inf: give a finite number",
        "--final-stage-layers 1": "--final-stage-layers 1 is for the method redis", "--method redis --final-stage-layers 6": "leaves a stage without a layer; give 0 to 5",
        "--method redis --final-stage-layers -1": "--final-stage-layers",
        "--save-interval -1": "--save-interval", "--eval-interval -1": "--eval-interval", "--eval-iters 0": "--eval-iters",
        "--log-interval 0": "--log-interval", "--seq-length 0": "--seq-length 0", "--ffn 0": "--ffn 0: give 1 or more", "--micro-batch-size 0": "--micro-batch-size 0",
        "--text ''": "--text", "--text /no/such/text": "--text /no/such/text: there is no such file", "--text /dev/zero": "is neither a file nor a folder",
        "--tokenizer {}/none.json": "there is no such file; give a tokenizer.json", "--tokenizer {} ": "no such file", "--tokenizer {}/x --tokenizer-vocab-size 300": "leave one",
        "--resume": "holds no checkpoint of vocab-2", "--resume --overwrite": "give one of the two", "--costs {}/none.json": "none.json", "--nonsense": "nonsense",
        "word": "word",
    }.items():  # fmt: skip
        yield BadInput(f"train {flags}", f"{small} {flags}", re.escape(says))
    for name, (content, says) in {
        "empty": ("", "is empty"), "blank": (" \n\n", "is empty"), "zero": (b"ab\0cd", "is not text"), "binary": (b"\xff\xfe\xfa" * 9, "is not text"),
        "folder": (None, "holds no text file"), "half-a-dataset": (b"\0\1", "is not text"),
    }.items():  # fmt: skip
        yield BadInput(f"train-text-{name}", f"{small} --text {{}}/x.bin", rf"--text \S+x.bin {says}.*; give a", {"x.bin": content})


EXPERIMENT = {
    "name": "a", "gpus": "2", "tp": "1", "family": "1f1b", "method": "vocab-2", "layers": "4", "hidden": "32", "heads": "4", "seq_length": "64", "vocab_k": "16",
    "micro_batch": "1", "microbatches": "8", "iterations": "8", "warmup": "2", "lr": "1e-3",
}  # fmt: skip


def table(**changes: str) -> str:
    row = {**EXPERIMENT, **changes}
    return ",".join(row) + "\n" + ",".join(row.values()) + "\n"


def artifact() -> Iterator[BadInput]:
    run = "lab artifact run {}/x.csv --megatron {} --dry-run"
    yield from (replace_file(bad, "x.csv") for bad in junk("artifact", run, "x.csv"))
    for name, (changes, says) in {
        "method": ({"method": "x"}, "unknown method 'x'"), "family": ({"family": "x"}, "unknown family 'x'"), "gpus-zero": ({"gpus": "0"}, "gpus is 0"),
        "tp-zero": ({"tp": "0"}, "tp is 0; give a number above 0"), "tp-negative": ({"tp": "-1"}, "tp is -1"), "gpus-text": ({"gpus": "x"}, "column 'gpus': 'x'; give a number"),
        "layers-empty": ({"layers": ""}, "column 'layers': ''"), "warmup": ({"warmup": "8"}, "8 warm-up iterations of 8"), "lr": ({"lr": "nan"}, "lr is nan"),
        "lr-text": ({"lr": "x"}, "column 'lr'"), "odd": ({"gpus": "3", "tp": "2"}, "3 GPUs are not a multiple of 2"), "layers-zero": ({"layers": "0"}, "layers is 0"),
        "hidden-negative": ({"hidden": "-32"}, "hidden is -32"), "name-empty": ({"name": ""}, "name ''"), "name-path": ({"name": "../a"}, "name '../a' cannot be a folder's"),
        "heads-zero": ({"heads": "0"}, "heads is 0"), "vocab-zero": ({"vocab_k": "0"}, "vocab_k is 0"), "micro-zero": ({"microbatches": "0"}, "microbatches is 0"),
        "length-zero": ({"seq_length": "0"}, "seq_length is 0"), "quote": ({"name": '"a'}, "give 15 cells"),
    }.items():  # fmt: skip
        yield BadInput(f"artifact-{name}", run, f"x.csv, line 2.*{says}", {"x.csv": table(**changes)})
    yield BadInput("artifact-column", run, "line 1: no column 'name'; give name, gpus, tp", {"x.csv": table().replace("name,", "title,", 1)})
    yield BadInput("artifact-twice", run, "a second 'a'", {"x.csv": table() + table().splitlines()[1] + "\n"})
    yield BadInput("artifact-short-row", run, "x.csv", {"x.csv": table() + "b,2\n"})
    yield BadInput("artifact-long-row", run, "x.csv", {"x.csv": table().rstrip() + ",1,2\n"})
    yield BadInput("artifact-only", run + " --only b", "has no row b", {"x.csv": table()})
    yield BadInput("artifact-no-checkout", run, "is not a checkout", {"x.csv": table()})
    yield BadInput("artifact-checkout-missing", "lab artifact run {}/x.csv --megatron {}/none --dry-run", "is not a checkout", {"x.csv": table()})
    yield BadInput("artifact-show-nothing", "lab artifact show {}", "holds no results")
    yield BadInput("artifact-show-missing", "lab artifact show {}/none", "holds no results")
    yield BadInput("artifact-show-junk", "lab artifact show {}", "holds no results", {"a/result.0.json": "{"})
    yield BadInput("artifact-show-deep", "lab artifact show {}", "holds no results|nested", {"a/result.0.json": DEEP})
    yield BadInput("artifact-verb", "lab artifact x", "x")
    yield BadInput("artifact-peak", "lab artifact show {} --peak-tflops x", "--peak-tflops")


def others() -> Iterator[BadInput]:
    for arguments, says in {
        "": "Usage|Verbs", "x": "x", "--nonsense": "nonsense", "doctor --megatron {}/none": "none", "doctor --megatron {}": "megatron/core", "doctor --gpu --megatron {}": "--gpu",
        "doctor --format x": "--format", "lab patches x": "x",
        "lab runtime --pp 0": "--pp", "lab runtime --pairs 0": "steps|pairs|--steps", "lab runtime --device tpu": "device",
        "lab runtime --layers 3": "layers", "lab kernels --rounds 0": "rounds", "lab kernels --device tpu": "tpu", "lab kernels --dtype x": "dtype",
        "lab kernels --device cuda": "cuda",
        "lab emulate x": "no schedule", "lab emulate v-x:vocab-2": "no schedule", "lab emulate vocab-2 --pp 0": "p", "lab emulate vocab-2 --microbatches 0": "microbatch", "lab emulate vocab-2 --scale 0": "--scale",
        "lab emulate vocab-2 --scale nan": "--scale|scale", "lab emulate vocab-2 --iterations 0": "--iterations",
        "lab emulate vocab-2 --pp 2 --microbatches 2 --scale 1e9": "scale 1e\\+09 and 1 iterations: the schedules take .* s, more than a day",
        "lab emulate vocab-2 --pp 2 --microbatches 2 --scale 0.01 --output {}/x.png": "cannot write .*x.png: the bars are an SVG; give --output FILE.svg",
        "lab emulate vocab-2 --report {}/none": "none", "lab emulate vocab-2 --costs {}/none": "none",
        "lab emulate v-half:": "no schedule", "lab emulate vocab-2 --report {}": "config.json|results", "lab emulate vocab-2 --pp 2 --microbatches 2 --output {}/no/x.svg": "cannot write",
    }.items():  # fmt: skip
        yield BadInput(arguments or "nothing", arguments, says)


BAD_INPUTS = tuple(bad for verb in (schedule, simulate, plan, paper, train, artifact, others) for bad in verb())
