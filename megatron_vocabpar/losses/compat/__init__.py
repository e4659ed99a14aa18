"""Functions with the names and positional arguments that RL frameworks call: swap one import.

``roll``, ``verl``, ``nemo_rl`` and ``slime`` name the file that they replace, and the commit whose signatures
they follow. If a framework reads a global group of Megatron's, so does its module here.
"""
