"""Megatron's own plans of a model chunk's layers, by which F and B hide each other's exchange of tokens.

Read ``chunk_plan.py``; ``handlers/planned_stages.py`` runs them.
"""
