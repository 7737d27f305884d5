"""The house: which room may import which, and what the wheel holds."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from kamera.store import ChunkStore, StoreAdmin

TOP = Path(__file__).parents[1]
MOST_BYTES = 5_000_000

SHARED_NAMES = 8
"""Class names that may be defined in more than one file of the product. It only shrinks; the goal is 8."""

AIR = 0.25
"""How far below its bound a count may lie before the bound has to follow it."""


def _files(*folders: str) -> dict[str, Path]:
    found = (path for folder in folders for path in (TOP / folder).rglob("*.py"))
    return {path.relative_to(TOP).as_posix(): path for path in found}


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(_text(path))


def test_imports_run_one_way_and_never_into_the_laboratory():
    # in a process of its own: import-linter switches off the loggers of the one it runs in
    lint = "from importlinter.cli import lint_imports as lint; raise SystemExit(lint(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", lint], cwd=TOP, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def _imported(path: Path) -> list[str]:
    """Modules that a file imports names from."""
    return [
        n.module for n in ast.walk(_tree(path)) if isinstance(n, ast.ImportFrom) and n.module and not n.level
    ]


def test_a_room_is_entered_by_its_door():
    """Names of another room come from its package; the command line alone imports late, and so deeper."""
    inside = []
    for name, path in _files("kamera").items():
        room = name.split("/")[1]
        for module in _imported(path):
            first, *parts = module.split(".")
            foreign = first == "kamera" and len(parts) > 1 and parts[0] != room
            if foreign and room != "cli" and not TOP.joinpath("kamera", *parts).is_dir():
                inside.append(f"{name} imports {module}")
    assert inside == []


def _imported_on_top(body: list[ast.stmt]) -> Iterator[str]:
    """Modules and names imported outside of functions, those for types alone included."""
    for node in body:
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{name.name}" for name in node.names)
            yield node.module
        elif isinstance(node, ast.If | ast.Try):
            yield from _imported_on_top([*node.body, *node.orelse])


def test_no_files_import_each_other_in_a_circle():
    """A package counts as a file of its own, and no name of it as its module does."""
    files = _files("kamera").items()
    modules = {name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): p for name, p in files}
    graph = dict[str, set[str]]()
    for module, path in modules.items():
        named = [name for name in _imported_on_top(ast.parse(_text(path)).body) if name in modules]
        parents = {name.rpartition(".")[0] for name in named}
        graph[module] = {name for name in named if name not in parents}
    assert len(graph["kamera.window.window"]) > 10
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the files


def _inner_names(tree: ast.Module) -> set[str]:
    """Names with an underscore that a file defines: functions, classes, fields, attributes of self."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node):
            found.add(node.attr)
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def _is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def test_no_room_reads_what_another_keeps_to_itself():
    """An attribute with an underscore that only another room defines; `_replace` is of named tuples."""
    trees = {name: _tree(path) for name, path in _files("kamera").items()}
    defined: dict[str, set[str]] = {}
    for name, tree in trees.items():
        for inner in _inner_names(tree):
            defined.setdefault(inner, set()).add(name.split("/")[1])
    read = []
    for name, tree in trees.items():
        room = name.split("/")[1]
        for node in (n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and not _is_own(n)):
            owners = defined.get(node.attr, set())
            if owners and room not in owners and node.attr != "_replace":
                read.append(f"{name}:{node.lineno} reads {ast.unparse(node)} of {', '.join(sorted(owners))}")
    assert read == []


def test_windows_patches_reuse_and_sessions_are_given_an_engine():
    """They name the contracts alone, in annotations, too: import-linter looks at what is imported to run."""
    files = _files("kamera/window", "kamera/patches", "kamera/reuse", "kamera/sessions")
    assert len(files) > 90
    named = [(name, module) for name, path in files.items() for module in _imported(path)]
    assert [pair for pair in named if pair[1].startswith("kamera.engines.")] == []


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _too_loose(bound: int, count: int) -> bool:
    return count < bound * (1 - AIR)


def test_a_class_name_means_one_thing():
    """Classes at the top of a file; a name with an underscore counts too, as readers search for it."""
    places: dict[str, set[str]] = {}
    for name, path in _files("kamera").items():
        for node in _tree(path).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, set()).add(name)
    shared = sorted(name for name, files in places.items() if len(files) > 1)
    assert len(shared) <= SHARED_NAMES, (
        f"{len(shared)} class names stand in several files: {', '.join(shared)}"
    )
    assert not _too_loose(SHARED_NAMES, len(shared)), f"{len(shared)} now: lower the bound"


def _public(cls: type) -> list[str]:
    """What it offers: methods and properties, its own and its bases'."""
    return sorted(name for name in dir(cls) if not name.startswith("_"))


def test_upkeep_is_a_class_of_its_own():
    assert ChunkStore.__bases__ == StoreAdmin.__bases__ == (object,)
    assert set(_public(ChunkStore)) & set(_public(StoreAdmin)) == set()


def test_no_product_code_asks_whether_a_test_runs_it():
    files = _files("kamera")
    assert len(files) > 200
    assert [n for n, path in files.items() if "pytest" in path.read_text(encoding="utf-8").lower()] == []


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    (built,) = WheelBuilder(str(TOP)).build(directory=str(folder), versions=["standard"])
    return Path(built)


def test_the_wheel_is_the_product_with_one_backbone(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"kamera", "kamera_kv-0.1.0.dist-info"}
    assert [n for n in names if ".safetensors" in n] == ["kamera/testbed/weights/gqa/model.safetensors.xz"]
    assert {
        "kamera/py.typed",
        "kamera/ops/kernels/serve.c",
        *(f"kamera/window/view/page.{kind}" for kind in ("html", "css", "js")),
        "kamera/cli/app.py",
    } <= set(names)


def test_the_wheel_stays_small(wheel):
    assert wheel.stat().st_size <= MOST_BYTES
