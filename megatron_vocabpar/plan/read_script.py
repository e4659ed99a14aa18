"""Reads Megatron's arguments from a launch script: from its text, or from what a run of it starts.

The text is split as a shell splits it (``shlex``). Assignments and arrays outside of branches are filled in.
What only a shell can say (``source``, arithmetic, output of commands, branches) stays as it is written; a
flag with such a value is an error as soon as the plan needs it (``Given.text``), whose remedy is ``--run``.
Next: ``read_arguments.py``.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from megatron_vocabpar.plan.given import OPEN, read_words
from megatron_vocabpar.schedule.data.schema import text_of

_SECONDS = 30  # that a script may run until it has started its training
_TELLING = frozenset(
    {
        "num-layers", "hybrid-layer-pattern", "hybrid-override-pattern", "hidden-size", "seq-length",
        "tensor-model-parallel-size", "pipeline-model-parallel-size", "micro-batch-size", "global-batch-size",
    }
)  # fmt: skip
"""A command with one of these flags starts a training."""
_SWIFT = ("megatron", "swift")
STARTERS = ("torchrun", "python", "python3", "srun", "ray", "mpirun", *_SWIFT)
_IDLE = ("pkill", "killall", "sleep")
"""Commands that a run of a script replaces: what starts trainings, and what ends or delays others."""
_BEGIN, _END = ("if", "for", "while", "until", "case", "select", "{"), ("fi", "done", "esac", "}")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:\[[@*]\])?(?::?-([^{}]*))?\})")
_OPEN_WORD = re.compile(r"\$(\w+|\{[^{}]*\}|\(.*\))")
_ARGUMENTS = re.compile(r"\[[@*]\]|args|opt|flags|param", re.IGNORECASE)
"""Names of variables that hold several arguments; others behind a flag are its value."""
_ASSIGNMENT = re.compile(r"(\w+)(\+?)=(.*)", re.DOTALL)
_MOST_NESTED = 8  # variables inside the value of a variable


def read_script(path: str) -> dict[str, str]:
    """The flags of the training that a script starts, by its text; nothing is run.

    Args:
        path: of the script. ``#SBATCH`` lines count as flags, too.

    Raises:
        ValueError: if the text says no flags of Megatron's, or several trainings, or if it leaves open what a
            word of the training's command is.
    """
    text = text_of(path, path)
    script = _Text()
    for tokens in _commands(text, path):
        script.read(tokens)
    words = _the_training(script.launches or script.arguments, path)
    if open_words := _open_words(words):
        raise ValueError(
            f"{path}: {', '.join(open_words)} in the command of the training: the text does not say which "
            "arguments these are; add --run, which runs the script up to there"
        )
    return read_words(_batch_words(text)) | read_words(words)


def run_script(path: str) -> dict[str, str]:
    """The flags of the training that a script starts, by a run of it.

    Commands that start a training only record their arguments and end (``STARTERS``); ``pkill``, ``killall``
    and ``sleep`` do nothing. All other commands of the script are run.

    Args:
        path: of the script, for bash.

    Raises:
        ValueError: if the run starts no training, or several that differ; the message has the last line that
            the script prints.
    """
    text = text_of(path, path)
    with tempfile.TemporaryDirectory(prefix="vocabpar-") as folder:
        record = Path(folder) / "record"
        record.touch()
        _write_stubs(Path(folder))
        environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"}
        last_line = _run(path, {**environment, "VOCABPAR_RECORD": str(record)})
        calls = [call.split("\0") for call in record.read_text("utf-8", "replace").split("\0\n") if call]
    launches = [list(_flattened(call)) for call in calls]
    words = _the_training([call for call in launches if _starts_training(call)], path, last_line)
    return read_words(_batch_words(text)) | read_words(words)


class _Text:
    """What a script's lines say so far: variables, and commands that start a training."""

    def __init__(self) -> None:
        self.launches: list[list[str]] = []
        self._values: dict[str, list[str] | None] = {}  # None: it depends on a branch
        self._depth = 0

    @property
    def arguments(self) -> list[list[str]]:
        """The arguments that a file sets for scripts that ``source`` it, if they are in one variable."""
        values = [list(_flattened(words)) for words in self._values.values() if words]
        telling = [words for words in values if _starts_training(words)]
        return telling if len(telling) == 1 else []

    def read(self, tokens: Sequence[str]) -> None:
        """Read one command, of words and punctuation."""
        words = list(tokens[1:] if tokens[0] == "function" else tokens)
        if words[1:3] == ["(", ")"] and "=" not in words[0]:
            del words[1:3]
        if words[1:2] == ["{"]:  # behind the name of a function
            del words[0]
        while words and words[0] in (*_BEGIN, *_END, "then", "do", "else", "elif", "export", "local", "exec"):
            word = words.pop(0)
            self._depth += (word in _BEGIN) - (word in _END)
            if word in ("for", "case", "select"):
                return
        while words and (match := _ASSIGNMENT.fullmatch(words[0])):
            words = self._assign(match, words[1:])
        expanded = list(_flattened([word for written in words for word in self._expanded(written)]))
        if _starts_training(expanded):
            self.launches.append([OPEN, *expanded] if self._depth else expanded)

    def _assign(self, match: re.Match[str], rest: Sequence[str]) -> list[str]:
        """Keep the value of an assignment; the words behind it."""
        name, more, value = match.groups()
        if rest and rest[0] == "(" and not value:
            end = next((place for place, word in enumerate(rest) if word == ")"), len(rest))
            values, rest = list(rest[1:end]), rest[end + 1 :]
        else:
            values = [value]
        expanded = [word for written in values for word in self._expanded(written)]
        before = self._values.get(name, []) if more else []
        self._values[name] = None if self._depth or before is None else [*before, *expanded]
        return list(rest)

    def _expanded(self, word: str) -> list[str]:
        """A word with the values of variables; several words where it is a variable that holds several."""
        if word in ("$@", "$*"):
            return []  # a script that is read has no arguments
        whole = _VARIABLE.fullmatch(word)
        if whole and (values := self._values.get(whole[1] or whole[2])) is not None:
            several = len(values) != 1 or " --" in values[0] or values[0].startswith("--")
            return [part for value in values for part in _split(value)] if several else list(values)
        for _ in range(_MOST_NESTED):
            filled = _VARIABLE.sub(self._value, word)
            if filled == word:
                break
            word = filled
        return _split(word) if whole and " --" in word else [word]

    def _value(self, match: re.Match[str]) -> str:
        name, default = match[1] or match[2], match[3]
        if name in self._values:
            values = self._values[name]
            return match[0] if values is None else " ".join(values)
        return match[0] if default is None else default


def _commands(text: str, path: str) -> Iterator[list[str]]:
    """The commands of a script, each as words; a line that ends within quotes or brackets goes on below."""
    line = ""
    for part in text.replace("\\\n", " ").splitlines():
        line += part
        try:
            tokens = _tokens(line)
        except ValueError:  # within quotes
            line += "\n"
            continue
        if "".join(tokens).count("(") > "".join(tokens).count(")") and "(" in tokens:
            line += "\n"
            continue
        line = ""
        command: list[str] = []
        for token in [*tokens, ";"]:
            if set(token) <= set(";&|") and token:
                if command:
                    yield command
                command = []
            else:
                command.append(token)
    if line.strip():
        raise ValueError(f"{path}: quotes or brackets are not closed; add --run, or mend the script")


def _tokens(line: str) -> list[str]:
    """Words and punctuation of a line, as a shell has them, without comments."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|<>()")
    lexer.whitespace_split = True
    parts = [part for token in lexer for part in (list(token) if set(token) <= set("()") else [token])]
    tokens: list[str] = []
    nested = 0
    for (
        part
    ) in parts:  # the output of a command and arithmetic, $( ) and $(( )), are one word as it is written
        if nested or (part == "(" and tokens and tokens[-1].endswith("$")):
            tokens[-1] += part if part in "()" or tokens[-1].endswith("(") else f" {part}"
            nested += (part == "(") - (part == ")")
        else:
            tokens.append(part)
    return tokens


def _split(value: str) -> list[str]:
    try:
        return shlex.split(value)
    except ValueError:
        return value.split()


def _flattened(call: Sequence[str]) -> Iterator[str]:
    """The words of a call, and those of a command that stands in one word, as behind ``bash -c``."""
    for word in call:
        if re.search(r"\s--\w", word):
            yield from _split(word)
        else:
            yield word


def _starts_training(words: Sequence[str]) -> bool:
    return not _TELLING.isdisjoint(read_words(words))


def _the_training(launches: Sequence[Sequence[str]], path: str, last_line: str = "") -> list[str]:
    """The only training among these, or ValueError."""
    different = {tuple(words) for words in launches}
    if len(different) == 1:
        return list(launches[0])
    if not different:
        named = ", ".join(f"--{name}" for name in ("num-layers", "seq-length", "micro-batch-size"))
        raise ValueError(
            f"{path}: no command has Megatron's arguments, such as {named}"
            + (f" (the script's last line: {last_line})" if last_line else "")
            + "; give them after --, or name another script"
        )
    named = "; ".join(" ".join(words).removeprefix(OPEN).strip()[:60] for words in different)
    raise ValueError(
        f"{path} starts {len(different)} trainings ({named}); give the arguments of one after --"
    )


def _open_words(words: Sequence[str]) -> list[str]:
    """Words that may stand for any arguments: variables without a value, unless they are a flag's value."""
    if words[0] == OPEN:
        return ["a branch (if, for, while, case, a function)"]
    behind = zip(["", *words], words, strict=False)
    return [
        word
        for before, word in behind
        if _OPEN_WORD.fullmatch(word) and (_ARGUMENTS.search(word) or not before.startswith("--"))
    ]


def _batch_words(text: str) -> list[str]:
    """The words of ``#SBATCH`` lines."""
    lines = [line.strip() for line in text.splitlines()]
    return [word for line in lines if line.startswith("#SBATCH") for word in _split(line)[1:]]


def _write_stubs(folder: Path) -> None:
    """Commands that record their arguments, one after another, with zero bytes in between."""
    record = r"""{ printf '%s\0' "${0##*/}" GPUS "$@"; printf '\n'; } >> "$VOCABPAR_RECORD" """
    # ms-swift's command reads its GPUs from the environment.
    gpus = '${NPROC_PER_NODE:+"--nproc-per-node=$NPROC_PER_NODE"} ${NNODES:+"--nnodes=$NNODES"}'
    for name in (*STARTERS, *_IDLE):
        lines = ["#!/bin/sh"]
        if name.startswith("python") and (own := shutil.which(name) or sys.executable):
            # Scripts ask Python small questions, such as for a free port.
            lines.append(f'case "$1" in -c|-) exec {shlex.quote(own)} "$@";; esac')
        lines.append("exit 0" if name in _IDLE else record.replace("GPUS", gpus if name in _SWIFT else ""))
        stub = folder / name
        stub.write_text("\n".join([*lines, ""]), "utf-8")
        stub.chmod(0o755)


def _run(path: str, environment: dict[str, str]) -> str:
    """Run a script in a session of its own, and end what is left of it; the last line that it prints."""
    with tempfile.TemporaryFile("w+", errors="replace") as printed:
        process = subprocess.Popen(
            ["bash", path],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        with suppress(subprocess.TimeoutExpired):  # it may wait for what the training would have done
            process.wait(timeout=_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        printed.seek(0)
        output = printed.read()
    # A shell that traces its commands (set -x) prints lines that begin with +.
    lines = [line for line in output.splitlines() if line.strip() and not line.startswith("+")]
    return lines[-1][:200] if lines else ""
