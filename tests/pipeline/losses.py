"""Loss functions that are not linear in the tokens' losses, as in reinforcement learning."""

from __future__ import annotations

from collections.abc import Callable

import torch

Fields = dict[str, torch.Tensor]
Loss = Callable[[Fields, torch.Tensor], tuple[torch.Tensor, dict[str, torch.Tensor]]]


def ppo(fields: Fields, logp: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Clipped surrogate, Schulman et al. (2017), equation 7: and the share that is clipped."""
    return _surrogate(fields, logp, fields["advantages"])


def grpo(fields: Fields, logp: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Advantages normalised in the group, and the KL to a reference; Shao et al. (2024), equation 3."""
    rewards = fields["rewards"]
    advantages = (rewards - rewards.mean()) / (rewards.std(unbiased=False) + 1e-4)
    losses, metrics = _surrogate(fields, logp, advantages[:, None])
    ratio = fields["reference_logp"] - logp
    kl = ratio.exp() - ratio - 1
    return losses + 0.3 * kl, metrics | {"kl": (kl * fields["loss_mask"]).sum()}


def entropy_bonus(fields: Fields, logp: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """PPO's with all terms: the tokens' entropies are part of the loss; its equation 9."""
    losses, metrics = ppo(fields, logp)
    entropy = fields["entropy"]
    losses = losses - 0.4 * entropy + 0.1 * (entropy + logp) ** 2
    return losses, metrics | {"entropy": (entropy * fields["loss_mask"]).sum()}


def focal(fields: Fields, logp: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Lin et al. (2017), equation 4, with an exponent of 2."""
    return -((1 - logp.exp()) ** 2) * logp, {}


def dpo(fields: Fields, logp: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Pairs of sequences, chosen and rejected, in one microbatch; Rafailov et al. (2023), equation 7."""
    margins = ((logp - fields["reference_logp"]) * fields["loss_mask"]).sum(1)
    margins = margins[0::2] - margins[1::2]
    losses = -torch.nn.functional.logsigmoid(0.5 * margins)
    # Spread over the tokens, so that a masked mean of them is the mean over pairs.
    share = losses.mean() / fields["loss_mask"].sum().clamp(min=1)
    return share.expand_as(logp), {"accuracy": (margins > 0).float().mean()}


def _surrogate(
    fields: Fields, logp: torch.Tensor, advantages: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    ratio = (logp - fields["old_logp"]).exp()
    clipped = ratio.clamp(0.8, 1.2)
    share = ((ratio != clipped) * fields["loss_mask"]).sum() / fields["loss_mask"].sum().clamp(min=1)
    return -torch.minimum(ratio * advantages, clipped * advantages), {"clipped": share}


LOSSES: dict[str, Loss] = {"ppo": ppo, "grpo": grpo, "focal": focal, "dpo": dpo, "entropy": entropy_bonus}
