"""``vocabpar doctor``: what the flag would do to a Megatron-LM checkout, without importing or changing it."""

from __future__ import annotations

from pathlib import Path

import click

from megatron_vocabpar.integration.bindings import BINDINGS, VERSIONS, Binding, find_version
from megatron_vocabpar.integration.sources import source_file, source_signatures, takes_by_value

PATCHED = VERSIONS[:-1]
"""Versions with a patch for each of their tags; the development branch has none."""

_SCRIPT = "pretrain_gpt.py"
_LINE = "import megatron_vocabpar.adaptor"


@click.command()
@click.option(
    "--megatron",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    required=True,
    help="A Megatron-LM checkout.",
)
@click.option("--allow-unknown", is_flag=True, help="As --vocab-parallel-allow-unknown-megatron.")
def doctor_command(megatron: Path, allow_unknown: bool) -> None:
    """Say which version of Megatron this is, and what --enable-vocab-parallel would replace in it."""
    if not (megatron / "megatron" / "core").is_dir():
        raise ValueError(f"{megatron} holds no megatron/core; give the path of a Megatron-LM checkout")
    version = find_version(source_signatures(megatron), allow_unknown)
    click.echo(f"{megatron}: Megatron core {version}, by its signatures")
    for binding in BINDINGS:
        click.echo("\n".join(_lines(megatron, binding)))
    click.echo(_door(megatron, version))


def _lines(checkout: Path, binding: Binding) -> list[str]:
    modules = [module for module in binding.copies if takes_by_value(checkout, module, binding.name)]
    lines = [f"  {binding.module}.{binding.name}", f"      {binding.reason}"]
    if modules:
        lines.append(f"      copies: {', '.join(modules)}")
    if not binding.partitioned_only:
        lines.append("      also with --enable-layer-redistribution alone")
    return lines


def _door(checkout: Path, version: str) -> str:
    if source_file(checkout, Path(_SCRIPT).stem) is None:
        return f"There is no {_SCRIPT}: use a Megatron-LM checkout, not the megatron-core package"
    if _LINE in (checkout / _SCRIPT).read_text(encoding="utf-8"):
        return f"{_SCRIPT} is patched: run it with --enable-vocab-parallel"
    patch = f", or apply the patch of its tag, patches/core_v{version}.*" if version in PATCHED else ""
    return (
        f"{_SCRIPT} is not patched: run it as -m megatron_vocabpar.launch {checkout / _SCRIPT} "
        f"--enable-vocab-parallel{patch}"
    )
