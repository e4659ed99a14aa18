"""Training on emulated GPUs: see ``README.md``."""

STREAMS = "AccumulateGrad node's stream does not match"
"""A warning of PyTorch's, of a wait that costs time."""
