"""Megatron's plans of a model chunk's layers: with them F and B hide each other's exchange of tokens.

``chunk_plan.py`` wraps such a plan, and ``handlers/planned_stages.py`` runs it.
"""
