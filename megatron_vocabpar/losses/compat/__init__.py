"""Functions with the names and positional arguments that RL frameworks call: swap one import.

``roll``, ``verl``, ``nemo_rl`` and ``slime`` each name the file that they stand in for, and the commit whose
signatures they follow. Where a framework reads a global group, so does its module here: from Megatron.
"""
