"""Which folders are checkpoints, and which are kept."""

from __future__ import annotations

from pathlib import Path

from megatron_vocabpar.train.output import checkpoint_folder, keep_newest, steps_done


def write(folder: Path, steps: int) -> None:
    checkpoint = checkpoint_folder(folder, steps)
    checkpoint.mkdir(parents=True)
    (checkpoint / "metadata.json").write_text("{}")


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
    left = sorted(path.name for path in (tmp_path / "checkpoint").iterdir())
    assert left == ["step_0000020", "step_0000030"]
