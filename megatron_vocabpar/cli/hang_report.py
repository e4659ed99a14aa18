"""What ``vocabpar schedule --check nccl`` prints: whether a program hangs, in each model of how GPUs wait."""

from __future__ import annotations

from megatron_vocabpar.schedule.hang import find_hangs
from megatron_vocabpar.schedule.plan import Plan


def hang_report(plan: Plan) -> str:
    """One line a model, for training and for evaluation; below a hang the ranks that wait for each other."""
    lines = []
    for name, part in (("training", plan), ("evaluation", plan.forward_only)):
        lines.append(f"{name}:")
        for model, circle in find_hangs(part.schedule, part.program).items():
            verdict = "hangs" if circle else "no hang"
            lines.append(f"  {model.name:<22}{verdict:<9}{model.summary}")
            lines += [f"      {wait}" for wait in circle]
    return "\n".join(lines)
