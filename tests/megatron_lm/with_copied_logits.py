"""The checkout's training script, whose divergence from a stored teacher gets a copy of the logits.

Stock's cross-entropy and its divergence write into the logits. In 16 bits both have made copies by then; in
float32 the cross-entropy leaves probabilities there, of which the divergence then makes a softmax.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

from megatron.training.distillation.cached_logits_loss import StudentLogitsCapture

from tests.megatron_lm.script_name import script_of

_capture = StudentLogitsCapture._capture_logits


def capture(self: Any, module: Any, given: Any, output: Any) -> None:
    _capture(self, module, given, output)
    if self._logits is not None:
        self._logits = self._logits.clone()


if __name__ == "__main__":
    StudentLogitsCapture._capture_logits = capture  # type: ignore[method-assign]
    runpy.run_module(script_of(sys.argv), run_name="__main__")
