"""The loss where Megatron's training loop looks for it: on the last rank, whichever rank has the last stage.

Its loss function runs on the token losses that arrive there. Its gradient was sent ahead
(``microbatches.py``), where it is linear in them; a late gradient is what it gives now.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod

import torch
import torch.distributed as dist

from megatron_vocabpar.integration import compat, heads
from megatron_vocabpar.integration.iteration import Iteration
from megatron_vocabpar.runtime.comm import broadcast
from megatron_vocabpar.schedule.passes import Pass, PassType


class LossReports:
    """Calls the loss function of the training script, microbatch by microbatch, and checks its gradients."""

    def __init__(self, iteration: Iteration) -> None:
        self.iteration = iteration
        self._looks = iteration.rank.not_finite is not None and iteration.rank.has_loss
        # What is to hold of microbatches, on the device.
        self._as_announced: dict[int, torch.Tensor] = {}
        self._finite_hidden: dict[int, torch.Tensor] = {}
        self._finite_losses: dict[int, torch.Tensor] = {}
        self._takes_entropy: list[int] = []

    def hidden(self, i: int, x: torch.Tensor) -> None:
        """Look at the hidden states ``[n, H]`` of microbatch ``i`` that the output layer is given."""
        if self._looks:
            self._finite_hidden[i] = x.isfinite().all()

    def report(
        self,
        i: int,
        token_losses: torch.Tensor,
        entropy: torch.Tensor | None = None,
        wins: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Megatron's loss function on the losses ``[1 + D, b, s]`` float32 of microbatch ``i``.

        Where entropies were asked for, likewise, it gets those of the first head too. ``wins``, likewise, is
        1 where the target is the most likely id, for Megatron's log of the further heads.

        Returns:
            The gradient ``[k, 1 + D, b, s]`` float32 that it gives them; k is 2 where it may depend on the
            entropies, else 1; None in an evaluation.
        """
        iteration, call = self.iteration, self.iteration.call
        if self._looks:
            self._finite_losses[i] = token_losses.isfinite().all()
        model, recorded = call.chunks[-1], iteration.recorded[iteration.rank.placement.loss_stage][i]
        main_loss = partial(heads.main_loss, model, recorded, training=not call.forward_only, wins=wins)
        reported, num_tokens, grad, more = compat.loss_and_gradient(
            model=model,
            token_losses=token_losses,
            entropy=None if entropy is None else entropy[0],
            main_loss=main_loss,
            loss_func=recorded.loss_func,
            config=call.config,
            num_microbatches=call.num_microbatches,
            cp_group_size=call.cp_group_size,
            collect_non_loss_data=call.collect_non_loss_data,
            with_gradient=not call.forward_only,
        )
        iteration.reported.extend(reported)
        iteration.num_tokens = iteration.num_tokens + num_tokens
        if grad is not None and not iteration.rank.method.late_gradient:
            announced = iteration.microbatches.gradient(i)
            close = torch.isclose(grad, announced, rtol=1e-4, atol=0.0, equal_nan=True)
            self._as_announced[i] = close.all()
        if grad is None:
            return None
        if not iteration.rank.output_options.entropy_gradient:
            if more is not None:
                self._takes_entropy.append(i)
            return grad[None]
        grads = torch.stack([grad, torch.zeros_like(grad)])
        if more is not None:
            grads[1, 0] = more
        return grads

    def finish(self) -> None:
        """Check gradients and losses; not in each microbatch, so that the host need not wait for the device.

        Raises:
            ValueError: if the loss function's gradient was not what had been announced, or there is one of
                the entropies, which was not asked for.
        """
        bent = _first_broken(self._as_announced)
        rank = f"rank {dist.get_rank()}"
        if bent is not None:
            raise ValueError(
                f"{rank}, microbatch {bent}: the loss function is not linear in the per-token losses: its "
                "gradient depends on their values. Vocabulary parallelism sends the gradient ahead; use a "
                "(masked) sum or mean, or have it sent when the losses are known: late_gradient=True, in "
                "Megatron-LM --vocab-parallel-late-gradient"
            )
        if self._takes_entropy:
            raise ValueError(
                f"{rank}, microbatch {self._takes_entropy[0]}: the loss depends on the entropies, whose "
                "gradient is not computed; detach them, or ask for it: OutputOptions(entropy_gradient=True)"
            )
        bad = _first_broken(self._finite_losses)
        if bad is not None:
            where = "in the output layer or before"
            if bad in self._finite_hidden:
                softmax = Pass(PassType.S, self.iteration.rank.pipeline_rank, bad)
                where = f"{'in' if self._finite_hidden[bad] else 'before'} pass {softmax}"
            tell = self.iteration.rank.not_finite
            assert tell is not None
            tell(f"{rank}: the loss of microbatch {bad} is not finite, first {where}")


def _first_broken(holds: Mapping[int, torch.Tensor]) -> int | None:
    """The first microbatch of which it does not hold."""
    if not holds or torch.stack(list(holds.values())).all():
        return None
    return min(i for i, value in holds.items() if not value)


class DistantLoss:
    """The loss of a whole output layer whose rank is not that of the loss function."""

    def __init__(self, iteration: Iteration) -> None:
        self.iteration = iteration
        self._token_losses: dict[int, torch.Tensor] = {}

    def keep(self, i: int, token_losses: torch.Tensor) -> None:
        """What the last stage computed for microbatch ``i``: ``[b, s]``."""
        self._token_losses[i] = token_losses

    def gradient(self, i: int) -> torch.Tensor:
        """Of the token losses of microbatch ``i``: ``[b, s]``."""
        return self.iteration.microbatches.gradient(i)[0]

    def finish(self) -> None:
        """Send the token losses of all microbatches, and report them.

        Raises:
            ValueError: if the loss function is not linear in them.
        """
        rank, shapes = self.iteration.rank, self.iteration.microbatches.shapes
        sizes = [prod(shape) for shape in shapes]
        if rank.is_last:
            flat = torch.cat([self._token_losses[i].flatten() for i in range(len(shapes))]).float()
        else:
            flat = torch.empty(sum(sizes), device=rank.device)
        broadcast(
            rank.groups, rank.groups.output, [flat], [rank.groups.members_of(rank.placement.last_rank)[0]]
        )
        if rank.has_loss:
            reports = LossReports(self.iteration)
            for i, losses in enumerate(flat.split(sizes)):
                reports.report(i, losses.view(shapes[i]))
            reports.finish()
