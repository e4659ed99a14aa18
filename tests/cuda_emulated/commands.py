"""What a user types on a machine with GPUs, on emulated ones, as a table of exit codes.

    python tests/cuda_emulated/start.py -m tests.cuda_emulated.commands [PART OF A NAME]

Models are small: times mean nothing here. ``vocabpar doctor --gpu`` has a test of its own.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time

_SMALL = "--pp 2 --layers 4 --hidden 32 --seq-length 32 --vocab-size 512 --device cuda"
_KERNELS = """
from lab.kernels import measured as kernels
kernels.shapes = lambda _: [kernels.Shape(256, 64, 2048, 8)]
from lab.__main__ import main
main(["kernels", "--device", "cuda", "--rounds", "2"])
"""
_STEPS = "host rows compilations waiting shared tests"
COMMANDS = {
    "vocabpar train": (
        "-m",
        "megatron_vocabpar",
        *["train", "--device", "cuda", "--pp", "4", "--output", "out"],
    ),
    "lab runtime": ("-m", "lab", "runtime", *_SMALL.split(), "--microbatches", "4", "--pairs", "2"),
    "lab kernels, of one small shape": ("-c", _KERNELS),
    "lab gpu, a dry run": ("-m", "lab", "gpu", *_STEPS.split(), "--tiny", "--save", "results"),
}


def main(part: str = "") -> int:
    """Print the table; the exit code."""
    print("| command | exit code | |\n| --- | --- | --- |", flush=True)
    failed = False
    for name, arguments in COMMANDS.items():
        if part not in name:
            continue
        start = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="emulated-gpus-") as folder:
            done = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True)
        lines = done.stderr.splitlines() if done.returncode else ()
        error = next((line for line in reversed(lines) if "Error" in line), "")
        print(f"| {name} | {done.returncode} | {time.monotonic() - start:.0f} s {error} |", flush=True)
        failed |= done.returncode != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
