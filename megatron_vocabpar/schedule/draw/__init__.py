"""Pictures of schedules in time: for the terminal, as SVG, and for trace viewers.

All three show one row a rank and the simulated times of ``simulate``.
Next: ``text.py``, ``svg.py``, ``trace.py``.
"""

from __future__ import annotations

from .svg import draw_svg
from .text import draw_text
from .trace import draw_trace

__all__ = ["draw_svg", "draw_text", "draw_trace"]
