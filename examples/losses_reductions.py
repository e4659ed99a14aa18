"""Masked means that no layout of microbatches changes: ``python examples/losses_reductions.py``."""

import torch

from megatron_vocabpar.losses import vocab_logprobs
from megatron_vocabpar.losses.reductions import by_group, joined, masked_sum, mean_of_counted, sentence_means

torch.manual_seed(0)
sentences, length, vocab = 4, 6, 10
logits = torch.randn(sentences, length, vocab)
targets = torch.randint(0, vocab, (sentences, length))
completion = torch.arange(length) < torch.tensor([[2], [6], [3], [1]])  # how many tokens of each count
logprobs = vocab_logprobs(list(logits.split(5, dim=-1)), targets)
sentence = torch.arange(sentences)[:, None].expand(sentences, length)
group_of_sentence = torch.tensor([0, 0, 1, 1])  # two samples of each prompt

for sizes in ([4], [1, 3], [2, 1, 1]):
    batches = list(zip(logprobs.split(sizes), completion.split(sizes), sentence.split(sizes), strict=True))
    token = joined([masked_sum(values, mask) for values, mask, _ in batches])
    per_sentence = [sentence_means(values, mask, ids, sentences) for values, mask, ids in batches]
    whole = sum(per_sentence[1:], start=per_sentence[0])
    groups = mean_of_counted(by_group(whole, group_of_sentence, 2))
    wrong = torch.stack([masked_sum(values, mask).mean() for values, mask, _ in batches]).mean()
    sentence_mean = float(mean_of_counted(whole))
    print(
        f"microbatches of {sizes} sentences: token mean {float(token):.6f}, sentences {sentence_mean:.6f}, "
        f"groups {float(groups):.6f}; mean of means {float(wrong):.6f}"
    )
