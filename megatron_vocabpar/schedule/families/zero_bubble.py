"""ZB-H1: 1F1B whose weight gradients W are passes of their own, which fill what would be bubbles.

B without W is shorter, so that activations would be released sooner; holding them until W uses up what is
gained: the peak is that of 1F1B.

Source: Qi et al., Zero Bubble Pipeline Parallelism (2023), section 2.3.
"""

from __future__ import annotations

from dataclasses import replace

from .one_f_one_b import ONE_F_ONE_B

ZB_H1 = replace(ONE_F_ONE_B, name="zb-h1", summary="1F1B with W split off, as zero-bubble H1", splits_w=True)
