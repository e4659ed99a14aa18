"""Megatron's defaults on a GPU: Transformer Engine's layers, and output layers that add to ``main_grad`` themselves.

``--gradient-accumulation-fusion`` leaves autograd a memory of no meaning, which a weight's attributes tell DDP
to add or not. So every weight that we make, share or place trains here as in stock, beside one process of it.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.cases import rest_is_slow
from tests.megatron_lm.test_transformer_engine import Case
from tests.megatron_lm.training import Log, is_since, pretrain, version_of, words
from tests.support.engine_models import Record, compare, train, weights
from tests.support.launch_options import CHUNKS, ENABLE, FROM_WEIGHTS

FROZEN = Path(__file__).with_name("with_frozen_weights.py")
