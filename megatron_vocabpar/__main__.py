"""``python -m megatron_vocabpar``: the same program as ``vocabpar``."""

from megatron_vocabpar.cli.main import main

if __name__ == "__main__":
    main()
