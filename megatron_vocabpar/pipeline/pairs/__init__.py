"""Megatron's own plans of a model chunk's layers, by which F of one microbatch hides the exchange between experts of
another's B, and the other way round.

Read ``chunk_plan.py``; ``handlers/planned_stages.py`` runs them.
"""
