"""The vocabulary layers: local mathematics of one shard, in PyTorch.

No process group, no schedule and no Megatron in here: what other ranks computed comes in as tensors.
Read ``numbers.py``, ``softmax_stats.py``, ``output/plain.py``, then ``embedding.py``;
``kernels/reference.py`` is the specification that device kernels must equal.
"""
