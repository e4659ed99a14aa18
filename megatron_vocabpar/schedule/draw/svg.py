"""A schedule as SVG, one row a rank, for a page or a paper.

Widths are times. A pass shows its microbatch where it fits; a browser shows the rest on hovering.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..costs import PassCosts
from ..passes import VOCABULARY_PASSES, Pass, PassType
from ..schedule import Schedule
from ..simulate import Simulation, simulate
from .style import STYLES, shade, types_in

_ROW, _GAP, _LEFT, _TOP, _RIGHT = 24, 4, 60, 34, 16  # pixels
_FORWARD_PX, _LEAST_PX, _MOST_PX = 26.0, 640.0, 12000.0
_DIGIT_PX = 6.4
_LEGEND_PX = 40


def draw_svg(
    schedule: Schedule,
    costs: PassCosts | None = None,
    *,
    title: str | None = None,
    simulation: Simulation | None = None,
) -> str:
    """The picture, as the text of an SVG file.

    Args:
        schedule: what to draw.
        costs: times of the passes; ``PassCosts.default`` where nothing is measured.
        title: the line above it; by default method, p and m.
        simulation: times to draw, if they are known; ``costs`` is then not used.
    """
    sim = simulation or simulate(schedule, costs)
    scale = _pixels_per_ms(sim)
    legend = list(_legend(schedule))
    width = _LEFT + max(sim.iteration_ms * scale, _LEAST_PX) + _RIGHT
    bottom = _TOP + schedule.p * (_ROW + _GAP)
    height = bottom + 26 + _LEGEND_PX
    heading = title or f"{schedule.method}, p = {schedule.p}, m = {schedule.m}"
    heading += f": {sim.iteration_ms:.1f} ms, idle {100 * sum(sim.bubble) / max(schedule.p, 1):.1f} %"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" '
        f'height="{height}" font-family="Helvetica, Arial, sans-serif" font-size="11">',
        f'<rect width="{width:.0f}" height="{height}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="20" font-size="13" font-weight="bold" fill="#222222">{heading}</text>',
    ]
    for rank, passes in enumerate(schedule.ranks):
        y = _TOP + rank * (_ROW + _GAP)
        lines.append(
            f'<text x="{_LEFT - 8}" y="{y + _ROW - 8}" text-anchor="end" fill="#222222">rank {rank}</text>'
            f'<rect x="{_LEFT}" y="{y}" width="{sim.iteration_ms * scale:.2f}" height="{_ROW}" '
            'fill="#f3f3f3"/>'
        )
        lines += [_pass(pass_, sim, scale, y, schedule) for pass_ in passes]
    lines += _axis(sim.iteration_ms, scale, bottom)
    lines.append(f'<g transform="translate({_LEFT},{bottom + 34})">')
    return "\n".join([*lines, *legend, "</g>", "</svg>", ""])


def _pixels_per_ms(sim: Simulation) -> float:
    """A middling forward pass is about as wide as two digits; very long schedules are squeezed."""
    forwards = sorted(end - start for pass_, (start, end) in sim.passes.items() if pass_.type is PassType.F)
    middle = forwards[len(forwards) // 2] if forwards else 0.0
    total = sim.iteration_ms or 1.0
    return min(max(_FORWARD_PX / (middle or total), _LEAST_PX / total), _MOST_PX / total)


def _pass(pass_: Pass, sim: Simulation, scale: float, y: float, schedule: Schedule) -> str:
    start, end = sim.passes[pass_]
    x, width = _LEFT + start * scale, (end - start) * scale
    chunk = 0 if pass_.type in VOCABULARY_PASSES else schedule.layout.chunk_of(pass_.stage)
    style = STYLES[pass_.type]
    hover = f"{pass_}: {style.meaning}, microbatch {pass_.microbatch}, {start:.2f} to {end:.2f} ms"
    shape = (
        f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW}" fill="{shade(style.fill, chunk)}" '
        f'stroke="#444444" stroke-width="0.4"><title>{hover}</title></rect>'
    )
    label = str(pass_.microbatch)
    if len(label) * _DIGIT_PX + 2 > width:
        return shape
    return shape + (
        f'<text x="{x + width / 2:.2f}" y="{y + _ROW - 8}" text-anchor="middle" fill="{style.ink}" '
        f'pointer-events="none">{label}</text>'
    )


def _axis(length_ms: float, scale: float, y: float) -> Iterator[str]:
    """Ticks at a round number of milliseconds, about 90 pixels apart."""
    wanted = 90.0 / scale
    power = 10.0 ** len(str(int(wanted))) / 10.0 if wanted >= 1 else 1.0
    step = next((k * power for k in (1, 2, 5, 10) if k * power >= wanted), 10 * power)
    for k in range(int(length_ms / step) + 1):
        x = _LEFT + k * step * scale
        yield f'<line x1="{x:.1f}" y1="{y}" x2="{x:.1f}" y2="{y + 5}" stroke="#888888" stroke-width="0.8"/>'
        unit = " ms" if k == 0 else ""
        yield f'<text x="{x:.1f}" y="{y + 17}" text-anchor="middle" fill="#666666">{k * step:g}{unit}</text>'


def _legend(schedule: Schedule) -> Iterator[str]:
    x = 0.0
    for type_ in types_in(schedule):
        style = STYLES[type_]
        text = f"{type_.value}: {style.meaning}"
        yield f'<rect x="{x:.0f}" y="0" width="14" height="14" fill="{style.fill}" stroke="#444444"/>'
        yield f'<text x="{x + 19:.0f}" y="11" fill="#222222">{text}</text>'
        x += 19 + len(text) * 6.2 + 16
