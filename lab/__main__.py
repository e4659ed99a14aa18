"""``python -m lab``: its verbs, each loaded only when it is asked for."""

from __future__ import annotations

import click

from megatron_vocabpar.cli.main import VerbGroup

VERBS = {
    "artifact": "Run the paper's experiments.",
    "paper": "The paper's tables, simulated.",
    "runtime": "Our executor beside Megatron's own 1F1B.",
    "gpu": "What half an hour of a GPU can tell, step by step.",
    "kernels": "The vocabulary layers' passes beside other layers.",
    "losses": "Our losses beside the frameworks' own functions.",
    "drift": "Why the log-probabilities of two runs differ.",
    "emulate": "Run schedules in real time, with sleeps for passes.",
    "model_types": "Weights of the model types that the planner reads, counted by transformers.",
    "optima": "Schedules beside proven optima of problems drawn from a seed.",
    "rates": "Errors of the planner's rates beside published runs.",
    "page": "A table of the documentation.",
    "patches": "What is replaced in Megatron.",
}
"""The line of ``--help`` for each verb."""


@click.group(
    "lab",
    cls=VerbGroup,
    verbs=VERBS,
    package="lab.verbs",
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
def main() -> None:
    """What measures and proves, in a clone of megatron_vocabpar."""


if __name__ == "__main__":
    main(prog_name="python -m lab")
