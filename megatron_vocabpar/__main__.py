"""The program ``vocabpar``, which ``python -m megatron_vocabpar`` runs, too."""

import os
import signal
import sys


def main() -> None:
    """Run the command line. Ctrl-C ends it with one line, even while it is still being imported."""
    if os.getpid() == 1:
        # The first process of a container ignores every signal that it does not handle: `docker stop` would
        # wait 10 s and then kill it. A handler that exits does what SIGTERM does to any other process.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        from megatron_vocabpar.cli.main import main as vocabpar

        vocabpar()
    except KeyboardInterrupt:
        sys.stderr.write("vocabpar: interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
