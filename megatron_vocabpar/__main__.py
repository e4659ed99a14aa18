"""``vocabpar``, and ``python -m megatron_vocabpar``, the same program."""

import sys


def main() -> None:
    """Run the command line; Ctrl-C while it is still being imported ends it as one later does."""
    try:
        from megatron_vocabpar.cli.main import main as vocabpar

        vocabpar()
    except KeyboardInterrupt:
        sys.stderr.write("vocabpar: interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
