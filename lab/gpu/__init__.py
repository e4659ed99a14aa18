"""Half an hour of a GPU: what ``make gpu`` measures, step by step, into one record.

Read ``steps.py`` first, which has them in their order.
"""
