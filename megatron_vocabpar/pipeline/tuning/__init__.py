"""Plans made again from measured pass times while training goes on, and kept for the next job.

Read ``measured_plan.py``.
"""
