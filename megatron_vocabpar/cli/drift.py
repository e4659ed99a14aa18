"""``vocabpar drift`` is ``python -m tools.drift`` now."""

from megatron_vocabpar.cli.elsewhere import elsewhere

drift_command = elsewhere("drift", "tools.drift")
