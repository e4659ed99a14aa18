"""S and T of one shard: ``plain.py`` first, then ``naive.py``, ``invariant.py``, ``shard_state.py``."""
