"""Weight gradients as passes of their own: what B leaves, and what W computes later.

Read ``weight_gradients.py``.
"""
