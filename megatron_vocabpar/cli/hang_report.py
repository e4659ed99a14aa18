"""What ``vocabpar schedule --check nccl`` prints: whether a program hangs, in each model of how GPUs wait."""

from __future__ import annotations

from megatron_vocabpar.schedule.costs import PassTimes
from megatron_vocabpar.schedule.hang import find_hangs, iteration_ms
from megatron_vocabpar.schedule.plan import Plan


def hang_report(plan: Plan) -> str:
    """One line a model, for training and for evaluation: the iteration's time, or who waits for whom."""
    lines = []
    for name, part in (("training", plan), ("evaluation", plan.forward_only)):
        schedule, program = part.schedule, part.program
        times = PassTimes.of(part.costs, schedule)
        lines.append(f"{name}:")
        for model, circle in find_hangs(schedule, program).items():
            verdict = (
                "hangs" if circle else f"no hang, {iteration_ms(schedule, program, times, model):.1f} ms"
            )
            lines.append(f"  {model.name:<22}{verdict:<22}{model.summary}")
            lines += [f"      {wait}" for wait in circle]
    return "\n".join(lines)
