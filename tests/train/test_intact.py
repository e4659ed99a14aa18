"""A damaged checkpoint is seen, set aside, and the intact one before it is used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_vocabpar.train.intact import DIGESTS_FILE, damage, write_digests
from megatron_vocabpar.train.output import checkpoint_folder, keep_newest, set_damaged_aside, steps_done


def write(folder: Path, steps: int) -> Path:
    checkpoint = checkpoint_folder(folder, steps)
    (checkpoint / "deeper").mkdir(parents=True)
    for name in ("weights", "deeper/more"):
        (checkpoint / name).write_bytes(f"{name} of {steps}".encode() * 100)
    write_digests(checkpoint)
    return checkpoint


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[37] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda at: flip(at / "deeper" / "more"), "deeper/more is not what was written"),
        (lambda at: (at / "weights").write_bytes(b""), "weights is not what was written"),
        (lambda at: (at / "weights").unlink(), "weights is missing"),
        (lambda at: (at / DIGESTS_FILE).write_text("{"), f"{DIGESTS_FILE} cannot be read"),
        (lambda at: (at / DIGESTS_FILE).write_text("[]"), f"{DIGESTS_FILE} names no files"),
    ],
)
def test_damage_is_named_and_the_one_before_is_used(
    tmp_path: Path, harm: Callable[[Path], object], message: str
) -> None:
    write(tmp_path, 20)
    newest = write(tmp_path, 40)
    assert damage(newest) is None
    harm(newest)
    lines: list[str] = []
    set_damaged_aside(tmp_path, lines.append)
    assert message in lines[0]
    assert lines[0].endswith("it is kept as step_0000040.damaged, and the one before it is used")
    assert steps_done(tmp_path) == 20
    assert (newest.parent / "step_0000040.damaged").is_dir()


def test_a_stray_or_empty_folder_is_no_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, 20)
    for name in ("step_0000060", "step_later", "notes"):
        (tmp_path / "checkpoint" / name).mkdir()
    assert steps_done(tmp_path) == 20


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for steps in (10, 20, 30):
        write(tmp_path, steps)
    keep_newest(tmp_path, 0)
    assert len(list((tmp_path / "checkpoint").iterdir())) == 3
    keep_newest(tmp_path, 2)
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == [
        "step_0000020",
        "step_0000030",
    ]
