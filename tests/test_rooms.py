"""The rooms of the package: what each imports, that arrows point one way, and that CONTRIBUTING says so."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megatron_vocabpar"


@cache
def imports(room: str) -> tuple[tuple[str, bool], ...]:
    """The modules that a room imports from outside itself, and whether as it is imported itself."""
    found = [each for path in sorted((PACKAGE / room).rglob("*.py")) for each in _imports_of(path)]
    own = f"megatron_vocabpar.{room}"
    return tuple((name, at_once) for name, at_once in found if not f"{name}.".startswith(f"{own}."))


def _imports_of(path: Path) -> Iterator[tuple[str, bool]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    at_once = set(map(id, tree.body))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = path.relative_to(ROOT).parts[: -node.level] if node.level else ()
            start = ".".join([*package, *([node.module] if node.module else [])])
            names = [f"{start}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from ((name, id(node) in at_once) for name in names)


def rooms_imported(room: str) -> set[str]:
    ours = [name.split(".") for name, _ in imports(room) if name.startswith("megatron_vocabpar.")]
    return {words[1] for words in ours if (PACKAGE / words[1]).is_dir()}


def libraries_imported(room: str, at_once: bool = False) -> set[str]:
    first = {name.partition(".")[0] for name, early in imports(room) if early or not at_once}
    return first - set(sys.stdlib_module_names) - {"megatron_vocabpar"}


def table() -> dict[str, tuple[set[str], set[str]]]:
    """CONTRIBUTING's table: of each room, the rooms and the libraries that it imports."""
    rows = {}
    for line in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines():
        cells = [re.findall(r"`([\w]+)/?`", cell) for cell in line.strip("|").split("|")]
        if re.match(r"\| `\w+/` \|", line):
            rows[cells[0][0]] = (set(cells[2]), set(cells[3]))
    return rows


ROOMS = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))


@pytest.mark.parametrize("room", ROOMS)
def test_the_table_says_what_a_room_imports(room: str) -> None:
    assert table()[room] == (rooms_imported(room), libraries_imported(room))


def test_the_table_has_no_other_rooms() -> None:
    assert sorted(table()) == ROOMS


def test_arrows_point_one_way() -> None:
    order = list(TopologicalSorter({room: rooms_imported(room) for room in ROOMS}).static_order())
    chain = [room for room in order if room in ("schedule", "runtime", "pipeline", "train", "cli")]
    assert chain == ["schedule", "runtime", "pipeline", "train", "cli"]


def test_a_schedule_needs_the_standard_library_alone() -> None:
    assert libraries_imported("schedule", at_once=True) == set()


def test_a_plan_needs_schedules_and_no_torch() -> None:
    assert rooms_imported("plan") == {"schedule"}
    assert libraries_imported("plan", at_once=True) == {"rich"}


FLOORS = ["words", "data", "times", "play", "check", "", "make", "draw"]  # of schedule; "" is its own files


def floor_of(module: str) -> str:
    words = module.split(".")
    return words[2] if (PACKAGE / "schedule" / words[2]).is_dir() else ""


def test_the_floors_of_schedule_are_its_folders() -> None:
    folders = {path.parent.name for path in PACKAGE.glob("schedule/*/__init__.py")}
    assert folders == {floor for floor in FLOORS if floor}


@pytest.mark.parametrize("floor", FLOORS)
def test_arrows_in_schedule_point_to_lower_floors(floor: str) -> None:
    folder = PACKAGE / "schedule" / floor
    files = folder.glob("*.py") if floor == "" else folder.rglob("*.py")
    names = {name for path in files for name, _ in _imports_of(path)}
    used = {floor_of(name) for name in names if name.startswith("megatron_vocabpar.schedule.")}
    assert used <= set(FLOORS[: FLOORS.index(floor) + 1])


@pytest.mark.parametrize("room", ["layers", "losses"])
def test_mathematics_knows_no_schedule(room: str) -> None:
    assert "schedule" not in rooms_imported(room)


def test_only_some_rooms_face_megatron() -> None:
    facing = {room for room in ROOMS if "megatron" in libraries_imported(room)}
    assert facing <= {"pipeline", "megatron_lm", "frameworks", "train", "measure", "losses"}


def test_no_files_import_each_other_in_a_circle() -> None:
    """Not for type checkers alone, either: who reads the one file would have to read the other first."""
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for folder in (PACKAGE, ROOT / "lab")
        for path in folder.rglob("*.py")
        if path != PACKAGE / "__init__.py"  # the public names, for type checkers
    }
    graph = {
        module: {
            part for name, _ in _imports_of(path) for part in (name, name.rpartition(".")[0]) if part in files
        }
        - {module, *_packages_of(module)}
        for module, path in files.items()
    }
    assert list(TopologicalSorter(graph).static_order())


def _packages_of(module: str) -> Iterator[str]:
    """The packages that a module is in: importing it imports them."""
    words = module.split(".")
    return (".".join(words[:end]) for end in range(1, len(words)))
