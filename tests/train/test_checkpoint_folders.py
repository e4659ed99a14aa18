"""Which folders are checkpoints."""

from __future__ import annotations

from pathlib import Path

from megatron_vocabpar.train.output import checkpoint_folder, steps_done


def write(folder: Path, steps: int) -> None:
    checkpoint = checkpoint_folder(folder, steps)
    checkpoint.mkdir(parents=True)
    (checkpoint / "metadata.json").write_text("{}")


def test_a_stray_or_empty_folder_is_no_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, 20)
    for name in ("step_0000060", "step_later", "notes"):
        (tmp_path / "checkpoint" / name).mkdir()
    assert steps_done(tmp_path) == 20
