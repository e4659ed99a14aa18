"""The text of a module in slime's place: its two results from whole logits, float64."""

PLAIN = """
import torch, torch.distributed as dist

def calculate_log_probs_and_entropy(logits, tokens, group, with_entropy=False, size=-1):
    parts = [torch.empty_like(logits) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, logits.detach(), group=group)
    parts[dist.get_rank(group)] = logits
    logs = torch.log_softmax(torch.cat(parts, dim=1).double(), dim=1)
    entropy = -(logs.exp() * logs).sum(1).float() if with_entropy else None
    return logs.gather(1, tokens[:, None]).float(), entropy
"""
