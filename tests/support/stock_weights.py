"""Stock checkpoints of eight layers that trainings start from."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

from tests.megatron_lm.training import pretrain, words
from tests.support.launch_options import EIGHT_LAYERS, UNTIED

EXPERTS = words(
    "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --disable-bias-linear "
    "--moe-token-dispatcher-type alltoall --moe-layer-freq [0,1,1,0,1,0,0,1]"
)

SETTINGS = {
    "plain": UNTIED,
    "tied": (),
    "experts": (*UNTIED, *EXPERTS),
    "odd": (*UNTIED, "--num-layers", "7"),
    "few microbatches, per-token loss": (*UNTIED, "--global-batch-size", "4", "--calculate-per-token-loss"),
    "batch ramp-up": (*UNTIED, *words("--rampup-batch-size 4 4 64 --train-samples 96")),
}
"""Options of stock and of ours; stock runs once for each, on one process."""


@cache
def weights(setting: str) -> Path:
    """A stock checkpoint after three iterations on one process."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    pretrain("--save", str(folder), *EIGHT_LAYERS, *SETTINGS[setting], iterations=3)
    return folder
