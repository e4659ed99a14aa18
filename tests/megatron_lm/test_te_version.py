"""Which Transformer Engine a Megatron names, read from files as its versions have them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_vocabpar.megatron_lm.requirements import te_agrees, te_line, te_named_by

BOUNDS = """
[project.optional-dependencies]
dev = ["nvidia-modelopt[torch]; sys_platform != 'darwin'", "transformer-engine[pytorch]>=2.6.0a0,<2.8.0"]
"""
COMMIT = """
[project.optional-dependencies]
te = ["transformer-engine[pytorch,core_cu13]"]
[tool.uv.sources]
transformer-engine = { git = "https://host/TransformerEngine.git", rev = "b9d690e042b1c4e4" }
"""
EXACT = """
[[tool.uv.dependency-metadata]]
name = "transformer-engine"
version = "2.17.1+4329ff84"
"""
REQUIRED = """Name: megatron-core
Requires-Dist: transformers; extra == "mlm"
Requires-Dist: transformer-engine[core_cu13,pytorch]<2.12.0,>=2.9.0a0; extra == "dev"
"""
ADDRESS = """Requires-Dist: transformer-engine[pytorch] @ git+https://host/TransformerEngine.git@main
"""
IN_BRACKETS = "Requires-Dist: transformer-engine (>=2.9,<2.12); extra == 'dev'\n"


@pytest.mark.parametrize(
    ("file", "text", "bounds", "commit"),
    [
        ("pyproject.toml", BOUNDS, ">=2.6.0a0,<2.8.0", ""),
        ("pyproject.toml", COMMIT, "", "b9d690e042b1c4e4"),
        ("pyproject.toml", COMMIT + EXACT, "==2.17.1+4329ff84", "b9d690e042b1c4e4"),
        ("pyproject.toml", "[project]\n", "", ""),
        ("megatron_core-0.16.1.dist-info/METADATA", REQUIRED, "<2.12.0,>=2.9.0a0", ""),
        ("megatron_core-0.16.1.dist-info/METADATA", ADDRESS, "", ""),
        ("megatron_core-0.16.1.dist-info/METADATA", IN_BRACKETS, ">=2.9,<2.12", ""),
        ("README.md", "", "", ""),
    ],
)
def test_what_a_megatron_names(tmp_path: Path, file: str, text: str, bounds: str, commit: str) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text)
    assert te_named_by(tmp_path) == (bounds, commit)


@pytest.mark.parametrize(
    ("found", "bounds", "expected"),
    [
        ("2.9.0", ">=2.9.0a0,<2.12.0", True),
        ("2.11.0+abc", "<2.12.0,>=2.9.0a0", True),
        ("2.12", ">=2.9.0a0,<2.12.0", False),
        ("2.8.9", ">=2.9.0a0,<2.12.0", False),
        ("2.10.0", ">=2.9.0a0,<2.12.0", True),
        ("2.17.1", "==2.17.1+4329ff84", True),
        ("2.17.0", "==2.17.1+4329ff84", False),
        ("2.11.0", "<=2.11.0", True),
        ("2.11.0", ">2.11.0", False),
        ("2.11.5", "~=2.11.0", True),
        ("2.12.0", "~=2.11.0", False),
        ("2.11.0", ">=2.9,!=2.11.0", False),
        ("2.11.0", "==2.11.*", True),
    ],
)
def test_versions_in_bounds(found: str, bounds: str, expected: bool) -> None:
    assert te_agrees(found, bounds) is expected


@pytest.mark.parametrize(
    ("found", "bounds", "revision", "expected"),
    [
        ("2.7.0", ">=2.6,<2.8", "", "Engine 2.7.0 is installed, as this Megatron names >=2.6,<2.8"),
        ("2.9.0", ">=2.6,<2.8", "", "Engine 2.9.0 is installed, but this Megatron names >=2.6,<2.8"),
        ("2.9.0", "", "0123456789" * 4, "2.9.0 is installed; this Megatron names revision 0123456789, no"),
        (
            None,
            "==2.9.1",
            "release_v2.9",
            "not installed, this Megatron names ==2.9.1 and revision release_v2.9:",
        ),
        (None, "", "", "this Megatron names none: give --transformer-impl local"),
    ],
)
def test_what_the_doctor_says(found: str | None, bounds: str, revision: str, expected: str) -> None:
    assert expected in te_line(found, bounds, revision)
