# ruff: noqa: E501
# fmt: off
"""Faults of a training job, by what is at stake."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from tests.faults import plants
from tests.faults.case import Fault, Place
from tests.faults.plants import at, by, ends, instead
from tests.faults.warm import Command, Plant

RESUME = "train --resume --steps 6 --no-save --save-interval 0 --output {}/out"
RESUME_SAVING = "train --resume --steps 6 --save-interval 1 --output {}/out"
KILL, TERM, INT = signal.SIGKILL, signal.SIGTERM, signal.SIGINT
FRESH = Fault.__dataclass_fields__["arguments"].default
SAVES_AT_END = FRESH.replace(" --no-save", "")
SAVING_TWICE = FRESH.replace("--no-save", "--save-interval 2")
on_resume = partial(Fault, arguments=RESUME, after="one")
"""A job of one method goes on; four of its six steps were done before."""


# ---- resume


def resume() -> Iterator[Fault]:
    done = r"step 6/6"
    yield on_resume("resume-plain", 0, rf"{done}(.*\n)*.*steps compared", after="two")
    yield Fault("resume-on-one-stage", 0, done, RESUME + " --pp 1", after="two")
    yield Fault("resume-with-another-method", 0, done, RESUME + " --method naive", after="one")
    yield Fault("resume-with-more-replicas", 0, done, RESUME + " --dp 2 --pp 1", after="one")
    yield Fault("resume-without-more-steps", 2, "has done 4 steps, and --steps is 4; give more", "train --resume --output {}/out", after="two")
    yield Fault("resume-fewer-steps", 2, "has done 4 steps, and --steps is 3; give more", "train --resume --steps 3 --output {}/out", after="two")
    yield Fault(
        "resume-of-another-model", 2, r"--hidden 16 \(this job: 32\), .*--seq-length 16 \(this job: 8\)", RESUME + " --hidden 32 --seq-length 8", after="two"
    )
    yield Fault("resume-nothing", 2, "holds no checkpoint", RESUME)
    yield Fault("resume-and-overwrite", 2, "give one of the two", RESUME + " --overwrite", after="one")
    yield Fault("resume-pp-too-large", 2, "--pp 4 is larger than --layers 2", RESUME + " --pp 4", after="one")
    for name, text in (
        ("cut", '{"pp": 2'),
        ("no-object", "[]"),
        ("binary", "\0\1"),
        ("unknown", '{"x": 1}'),
        ("empty", ""),
    ):
        yield on_resume(f"resume-config-{name}", 2, r"cannot read \S+config.json", after="two", prepare=writes("config.json", text))
        yield Fault(
            f"resume-method-config-{name}", 2, r"cannot read \S+config.json", RESUME, after="two",
            prepare=writes("vocab-2/config.json", text)
        )


def writes(name: str, text: str | bytes) -> Callable[[Place], object]:
    def prepare(place: Place) -> None:
        path = place.out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())

    return prepare


# ---- processes


def processes() -> Iterator[Fault]:
    yield Fault("lr-far-too-large", 1, r"loss (nan|inf) at step \d; give a smaller --lr", arguments=FRESH + " --lr 1e30")
    died = "rank {} was killed by signal {}"
    for rank, number, step, instruction in (
        (0, KILL, 1, ""), (1, KILL, 1, "1S0"), (0, KILL, 3, "0B1"), (1, KILL, 3, "1SEND_B0"), (1, signal.SIGSEGV, 2, "1F0"),
        (0, signal.SIGABRT, 2, "0F1"),
    ):  # fmt: skip
        yield Fault(
            f"orphans-rank-{rank}-{signal.Signals(number).name}-step-{step}-{instruction or 'between'}", 1, died.format(rank, int(number)),
            plant=at(rank, step, instruction, by(number))
        )
    for rank in (0, 1):
        yield Fault(f"orphans-rank-{rank}-killed-while-saving", 1, died.format(rank, 9), SAVING_TWICE, plant=while_saving(rank, by(KILL)))
        yield Fault(f"orphans-rank-{rank}-leaves", 1, f"rank {rank} ended with code 7", plant=at(rank, 2, f"{rank}F1", ends(7)))
    for step, instruction in ((1, ""), (2, "1F0")):
        yield Fault(
            f"orphans-launcher-killed-step-{step}-{instruction or 'between'}", -KILL, "training vocab-2", plant=at(1, step, instruction, by(KILL, parent=True))
        )
    yield Fault("orphans-launcher-killed-while-saving", -KILL, "training vocab-2", SAVING_TWICE, plant=while_saving(1, by(KILL, parent=True)))
    for number in (INT, TERM):
        name, code = signal.Signals(number).name, 128 + number
        yield Fault(f"stopped-{name}", code, "vocabpar train: interrupted", plant=at(1, 2, "1F0", by(number, parent=True)))
        yield Fault(f"stopped-{name}-to-all", code, "vocabpar train: interrupted", plant=at(0, 3, "0F1", plants.to_both(number)))
        yield Fault(f"stopped-{name}-while-saving", code, "vocabpar train: interrupted", SAVING_TWICE, plant=while_saving(1, by(number, parent=True)))
    for name, module, function in (("check", "run_job", "check"), ("prepare", "run_job", "prepare"), ("report", "report", "write_report")):
        yield Fault(f"stopped-SIGINT-in-{name}", 130, "vocabpar train: interrupted", plant=instead(f"megatron_vocabpar.train.{module}", function, by(INT)))
    yield Fault("stopped-ctrl-c-by-the-shell", 130, "vocabpar train: interrupted", real=True, meanwhile=_interrupted_soon)
    interrupts = f"import os; os.kill(os.getpid(), {int(INT)})"
    yield Fault(
        "stopped-ctrl-c-while-importing", 130, "^vocabpar: interrupted\n$", real=True, prepare=lambda place: (place.folder / "click.py").write_text(interrupts)
    )
    yield Fault("store-on-loopback", 0, "step 4/4", plant=at(0, 2, "0F0", lambda: listens_on_loopback()))


def while_saving(rank: int, deed: plants.Deed) -> Plant:
    return instead("megatron_vocabpar.train.trainer", "save_checkpoint", deed, rank=rank)


def _interrupted_soon(_: Place, command: Command) -> None:
    """As soon as the job has said its first word."""
    end = time.monotonic() + 120
    while not command.said()[0] and time.monotonic() < end:
        time.sleep(0.01)
    os.kill(command.pid, INT)


def listens_on_loopback() -> None:
    """No process of the job accepts connections of other machines."""
    ours = {
        os.readlink(f"/proc/{pid}/fd/{fd}")
        for pid in (os.getpid(), os.getppid())
        for fd in os.listdir(f"/proc/{pid}/fd")
        if os.path.exists(f"/proc/{pid}/fd/{fd}")
    }
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in ours:
                assert fields[1].split(":")[0] in ("0100007F", "0000000000000000FFFF00000100007F"), line


# ---- two jobs


def two_jobs() -> Iterator[Fault]:
    yield Fault("two-jobs-again-without-a-word", 2, "holds the results of an earlier job; give --resume, --overwrite, or", after="two")
    yield Fault("two-jobs-overwrite-says-so", 0, "replacing the results of vocab-2, baseline", FRESH + " --overwrite", after="two", spared=False)
    yield Fault(
        "two-jobs-in-a-folder-of-something-else", 2, "holds no results of an earlier job; give another folder", FRESH + " --overwrite",
        prepare=writes("thesis.txt", "years of work")
    )


# ---- damaged checkpoints


def replaced_by(make: Callable[[Path], object]) -> Callable[[Path], object]:
    """The file is removed, and this made in its place."""
    return lambda path: (path.unlink(), make(path))


HARMS: dict[str, Callable[[Path], object]] = {
    "empties": lambda path: path.write_bytes(b""),
    "cuts": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "removes": Path.unlink,
    "becomes_a_folder": replaced_by(Path.mkdir),
    "becomes_a_loop": replaced_by(lambda path: path.symlink_to(path.name)),
    "becomes_a_pipe": replaced_by(os.mkfifo),
}
NEWEST, EARLIER = "vocab-2/checkpoint/step_0000004", "vocab-2/checkpoint/step_0000002"


def harms(*pairs: tuple[str, str]) -> Callable[[Place], None]:
    """Files of the results folder are harmed: names of ``HARMS`` and of files."""

    def prepare(place: Place) -> None:
        for harm, name in pairs:
            HARMS[harm](place.out / name)

    return prepare


def damaged() -> Iterator[Fault]:
    for name in ("__0_0.distcp", "__1_1.distcp", "common.pt", ".metadata"):
        for harm in ("empties", "cuts", "removes"):
            if (name, harm) not in {("common.pt", "cuts"), ("__1_1.distcp", "empties")}:
                yield on_resume(f"damage-{harm}-{name}", 1, rf"rank \d raised .*({re.escape(name)}|cannot load \S+step_0000004 )", prepare=harms((harm, f"{NEWEST}/{name}")))
    for harm in ("becomes_a_folder", "becomes_a_loop"):
        yield on_resume(f"damage-{harm}", 1, r"rank \d raised .*cannot load \S+step_0000004 .*__0_1.distcp", prepare=harms((harm, f"{NEWEST}/__0_1.distcp")))
    yield on_resume("damage-without-metadata", 0, "step 6/6", prepare=harms(("removes", f"{NEWEST}/metadata.json")))
    yield on_resume(
        "damage-all", 2, r"holds no checkpoint", prepare=harms(("removes", f"{NEWEST}/metadata.json"), ("removes", f"{EARLIER}/metadata.json"))
    )
    for name in ("step_0000009", "step_later", "step_0000009.partial", "notes"):
        yield on_resume(f"damage-stray-folder-{name}", 0, "step 6/6", prepare=lambda place, name=name: (place.out / f"vocab-2/checkpoint/{name}").mkdir())
    yield on_resume("damage-stray-file", 0, "step 6/6", prepare=writes("vocab-2/checkpoint/step_0000006", "a file in its place"))
    yield on_resume(
        "damage-partial-with-files", 0, "step 6/6",
        prepare=lambda place: shutil.copytree(place.out / NEWEST, place.out / "vocab-2/checkpoint/step_0000006.partial")
    )


# ---- files that cannot be used


def in_the_way(name: str, also: str = "") -> Callable[[Place], None]:
    """A folder with something in it stands where a file should be written."""

    def prepare(place: Place) -> None:
        path = place.out / name
        if path.is_file():
            path.unlink()
        (path / "something").mkdir(parents=True)

    return prepare


def file_in_the_way(name: str) -> Callable[[Place], None]:
    def prepare(place: Place) -> None:
        path = place.out / name
        if path.is_dir():
            path.rename(place.folder / "moved")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("a file")

    return prepare


def small_disk(place: Place) -> None:
    """The results folder is on a disk of its own, which is nearly full."""
    moved = place.folder / "moved"
    if place.out.exists():
        place.out.rename(moved)
    place.out.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(place.out)], check=True)
    if moved.exists():
        shutil.copytree(moved, place.out, dirs_exist_ok=True)


def full_disk(place: Place) -> None:
    small_disk(place)
    with open(place.out / "filler", "wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * 4096)
        except OSError:
            pass


def read_only(place: Place) -> None:
    small_disk(place)
    subprocess.run(["mount", "-o", "remount,ro", str(place.out)], check=True)


def unmount(place: Place) -> None:
    subprocess.run(["umount", "-l", str(place.out)], check=False, capture_output=True)


def files() -> Iterator[Fault]:
    yield Fault("files-output-is-a-file", 2, "is a file; give a folder", prepare=lambda place: place.out.write_text(""))
    yield Fault("files-output-below-a-file", 2, "cannot use .*out", FRESH + "/deeper", prepare=lambda place: place.out.write_text(""))
    for name in ("index.html", "loss.png", "summary.json", "comparison.json"):
        yield on_resume(f"files-folder-instead-of-{name}", 2, rf"cannot use \S+{name}", after="two", prepare=in_the_way(name))
    for name in ("config.json",):
        yield on_resume(f"files-folder-instead-of-{name}", 2, rf"{name}", after="two", prepare=in_the_way(name))
    for name in ("metrics.jsonl", "schedule.svg", "timeline.json"):
        yield on_resume(
            f"files-folder-instead-of-{name}", 1, rf"rank 0 raised IsADirectoryError.*{name}", prepare=in_the_way(f"vocab-2/{name}"), spared=name != "metrics.jsonl"
        )
    yield Fault(
        "files-file-instead-of-checkpoint", 1, "checkpoint", SAVES_AT_END,
        plant=instead("megatron_vocabpar.train.run_job", "write_inputs", lambda: Path("out/vocab-2/checkpoint").write_text(""), after=True)
    )
    yield Fault("files-file-instead-of-method", 2, "cannot use .*naive", RESUME + " --method naive", after="one", prepare=file_in_the_way("naive"))
    yield Fault("files-cache-is-a-file", 2, "cannot use .*text.txt", variables={"VOCABPAR_CACHE": "text.txt"})
    yield Fault("files-cache-cannot-be-made", 2, "cannot use .*/dev/null", variables={"VOCABPAR_CACHE": "/dev/null/cache"})
    yield Fault("files-full-disk", 2, r"cannot use .*No space left", FRESH + "/deeper", prepare=full_disk)
    yield Fault(
        "files-full-disk-at-resume", 1, r"rank \d raised .*(No space left|iostream error)", RESUME_SAVING, after="one",
        prepare=full_disk
    )
    yield on_resume("files-read-only", 2, r"cannot use .*Read-only", prepare=read_only)
    for rank in (0, 1):
        yield Fault(
            f"files-disk-full-at-save-of-rank-{rank}", 1, r"rank \d raised ", RESUME_SAVING, after="one", plant=while_saving(rank, plants.no_more_than(20_000))
        )
    yield on_resume("files-disk-full-at-metrics", 1, r"rank 0 raised OSError: ", plant=at(0, 5, "0F0", plants.no_more_than(700)))
    yield on_resume(
        "files-disk-full-at-report", 2, r"cannot use .*File too large", plant=instead("megatron_vocabpar.train.report", "write_report", plants.no_more_than(100))
    )


# ---- metrics and the report


METRICS = "vocab-2/metrics.jsonl"


def line(number: int, text: bytes) -> Callable[[Place], None]:
    """A line of the metrics, counted from 0, is this instead."""

    def prepare(place: Place) -> None:
        path = place.out / METRICS
        lines = path.read_bytes().splitlines()
        lines[number] = text
        path.write_bytes(b"\n".join(lines) + b"\n")

    return prepare


def metrics() -> Iterator[Fault]:
    yield on_resume("metrics-line-cut-resumed", 0, r"step 6/6(.*\n)*results: ", after="two", prepare=line(1, b'{"step": 2, "lo'))


# ---- texts


def texts() -> Iterator[Fault]:
    wrong = "train {small} --steps 2 --output {}/out --text "
    yield Fault("text-pipe", 2, "is neither a file nor a folder", wrong + "{}/pipe", prepare=lambda p: os.mkfifo(p.folder / "pipe"))
    yield Fault("text-binary-later", 2, "is not text", wrong + "{}/b", prepare=lambda p: (p.folder / "b").write_bytes(b"text " * 20_000 + b"\xff\xfe"))
    yield Fault("text-folder-of-pipes", 2, "holds no text file", wrong + "{}/f", prepare=lambda p: [(p.folder / "f").mkdir(), os.mkfifo(p.folder / "f/pipe")])
    yield Fault(
        "text-short", 2, "too short|fewer than one sequence|cannot fill|give a longer text", wrong + "{}/s",
        prepare=lambda p: (p.folder / "s").write_text("short")
    )
    yield Fault("text-loop", 2, "cannot use|there is no such file|levels of symbolic", wrong + "{}/l", prepare=lambda p: (p.folder / "l").symlink_to("l"))
    yield Fault("text-half-an-indexed-dataset", 2, "--text", wrong + "{}/x.bin", prepare=lambda p: (p.folder / "x.bin").write_bytes(b"\0\1"))
    yield Fault(
        "text-indexed-dataset-of-nothing", 2, "--text", wrong + "{}/x", prepare=lambda p: [(p.folder / f"x.{e}").write_bytes(b"junk") for e in ("bin", "idx")]
    )
    yield Fault("text-tokenizer-junk", 2, "--tokenizer", wrong + "{}/text.txt --tokenizer {}/t.json", prepare=lambda p: (p.folder / "t.json").write_text("{}"))
    yield Fault(
        "text-tokenizer-binary", 2, "--tokenizer", wrong + "{}/text.txt --tokenizer {}/t.json", prepare=lambda p: (p.folder / "t.json").write_bytes(b"\xff\0")
    )
    yield Fault("text-tokenizer-is-a-folder", 2, "--tokenizer", wrong + "{}/text.txt --tokenizer {}")


# ---- torchrun, and verbs beside training


TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node 2 -m megatron_vocabpar " + FRESH


def _under_torchrun(signals_rank: int | None, number: int) -> Callable[[Place, Command], None]:
    """Once the ranks train: the launcher of this rank, or torchrun (None), gets this signal."""

    def meanwhile(place: Place, command: Command) -> None:
        record = place.out / "vocab-2" / "metrics.jsonl"
        end = time.monotonic() + 90
        while not (record.is_file() and record.read_text().count("\n")) and time.monotonic() < end:
            time.sleep(0.05)
        if signals_rank is None:
            os.kill(command.pid, number)
            return
        children = Path(f"/proc/{command.pid}/task/{command.pid}/children").read_text().split()
        of_rank = [int(pid) for pid in children if f"\0RANK={signals_rank}\0" in Path(f"/proc/{pid}/environ").read_text()]
        os.kill(of_rank[0], number)

    return meanwhile


def torchrun() -> Iterator[Fault]:
    long = TORCHRUN.replace("--steps 4", "--steps 400")
    for rank, number in ((0, KILL), (1, KILL)):
        yield Fault(f"torchrun-launcher-{rank}-killed", 1, "", long, limit_s=150, real=True, launched=True, meanwhile=_under_torchrun(rank, number))
    yield Fault("torchrun-killed", -KILL, "", long, limit_s=150, real=True, launched=True, meanwhile=_under_torchrun(None, KILL))
    yield Fault("torchrun-refused", 1, "torchrun started 2 processes, but the job has", TORCHRUN + " --tp 2", limit_s=150, real=True, launched=True)


def _once_it_has_processes(number: int) -> Callable[[Place, Command], None]:
    """Its whole process group gets this signal, as from a terminal; of SIGKILL it alone."""

    def meanwhile(_: Place, command: Command) -> None:
        children = Path(f"/proc/{command.pid}/task/{command.pid}/children")
        end = time.monotonic() + 60
        while not children.read_text() and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.5)
        os.kill(command.pid, number) if number == KILL else os.killpg(command.pid, number)

    return meanwhile


def beside() -> Iterator[Fault]:
    small = "lab emulate vocab-2 --pp 2 --microbatches 2 --scale 1"
    emulated = partial(instead, "lab.emulated_passes", "EmulatedRank.run")
    yield Fault("emulate-rank-1-killed", 1, r"lab emulate: error: rank 1 was killed by signal 9", small, plant=emulated(by(KILL), rank=1))
    yield Fault("emulate-rank-leaves", 1, "rank 0 ended with code 7", small, plant=emulated(ends(7), rank=0))
    yield Fault("emulate-launcher-killed", -KILL, "", small, plant=emulated(by(KILL, parent=True), rank=1))
    yield Fault("emulate-ctrl-c", 130, "lab emulate: interrupted", small, plant=emulated(by(INT, parent=True), rank=1))
    for number, code, said in ((KILL, -KILL, ""), (INT, 130, "^vocabpar plan: interrupted\n$")):
        meanwhile = _once_it_has_processes(number)
        yield Fault(f"plan-{number.name}", code, said, "plan --preset gemma-2-9b --pp 16", real=True, meanwhile=meanwhile)
    long_search = "schedule --family search --chunks 7 --pp 2 --microbatches 2000 --format json --output {}/s.json"
    yield Fault("search-says-what-it-tries", 0, r"2 of \d+: interleaved, at most 2 microbatches", long_search)
    yield Fault("emulate-disk-full", 2, "cannot use|cannot write", small + " --output /dev/full")
    yield Fault("emulate-into-a-folder-of-something-else", 2, "config.json", small + " --report {}/out", prepare=writes("thesis.txt", "years"))


FAULTS = tuple(
    fault
    for group in (resume, processes, two_jobs, damaged, files, metrics, texts, torchrun, beside)
    for fault in group()
)
