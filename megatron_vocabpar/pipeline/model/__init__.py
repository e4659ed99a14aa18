"""A rank's chunk of the model: transformer layers, and its rows of both vocabulary layers.

Read ``stage_model.py``, then ``vocab_layers.py``.
"""
