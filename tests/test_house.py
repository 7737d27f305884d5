"""The house: who imports whom, files that an operation enters, classes in all, and what a wheel holds."""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
from hatchling.builders.wheel import WheelBuilder

from benchmarks.store.content import CONTEXT, canonical
from kamera import ChatSession, ChunkStore, KameraWindow
from tests.sessions.rig import seeing, speaking

TOP = Path(__file__).parents[1]
MOST_BYTES = 13_500_000
"""Of a wheel: 1 MB of code, the testbed's weights (3.6 MB) and the screen reader's (8.4 MB)."""

MOST_CLASSES = 540
"""Classes of the product. It only shrinks; the goal is 300."""

MOST_FILES = {"append": 40, "slide": 35, "recall": 36, "generate": 23, "second send": 63}
"""Files of the product that an operation enters. They only shrink; the goals are 25, 15, 25, 25 and 40."""

MOST_STORE_FILES = {"put_many": 11, "a hit": 3, "a hit in memory://": 2}
"""Files that a batch of new objects and a look-up in memory enter, of a directory (goals: 5, 3 and 3)."""


def _modules() -> dict[str, Path]:
    paths = sorted((TOP / "kamera").rglob("*.py"))
    names = {path: ".".join(path.relative_to(TOP).with_suffix("").parts) for path in paths}
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


def test_imports_run_one_way():
    # in a process of its own: import-linter switches off the loggers of the one it runs in
    lint = "from importlinter.cli import lint_imports as lint; raise SystemExit(lint(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", lint], cwd=TOP, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def _imported(body: list[ast.stmt]) -> Iterator[str]:
    """Modules and names imported anywhere, but for types alone."""
    for node in body:
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            yield from _imported([child for child in ast.walk(node) if isinstance(child, ast.ImportFrom)])


def test_no_files_import_each_other_in_a_circle():
    modules = _modules()
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        named = set(_imported(ast.parse(path.read_text(encoding="utf-8")).body))
        files = {name if name in modules else name.rpartition(".")[0] for name in named}
        graph[module] = (files & modules.keys()) - {module}
    assert len(graph["kamera.window.window"]) > 10
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the files


def test_classes_become_fewer():
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in _modules().values()]
    count = sum(isinstance(node, ast.ClassDef) for tree in trees for node in ast.walk(tree))
    assert count <= MOST_CLASSES
    assert count > MOST_CLASSES * 0.9, f"{count} classes now: lower the bound"


def _entered(work: Callable[[], Any]) -> set[str]:
    """Files of the product whose functions this thread called."""
    seen: set[str] = set()
    sys.setprofile(lambda frame, event, _: seen.add(frame.f_code.co_filename) if event == "call" else None)
    try:
        work()
    finally:
        sys.setprofile(None)
    inside = TOP / "kamera"
    return {path.relative_to(inside).as_posix() for path in map(Path, seen) if path.is_relative_to(inside)}


def test_operations_enter_few_files():
    window = KameraWindow(seeing(), ChunkStore.open("memory://"), system="You watch.")
    first = window.append("frame 0 of a door " * 9).slot
    for number in (1, 2):
        window.append(f"frame {number} of a door " * 9)
    session = ChatSession(speaking("headers"), ChunkStore.open("memory://"))
    session.send("hello", max_new_tokens=2)
    entered = {
        "append": _entered(lambda: window.append("frame 3 of a door " * 9)),
        "slide": _entered(lambda: window.slide(1)),
        "recall": _entered(lambda: window.recall(first.chunk_id)),
        "generate": _entered(lambda: window.generate("What is seen?", max_new_tokens=2)),
        "second send": _entered(lambda: session.send("and now?", max_new_tokens=2)),
    }
    for name, files in entered.items():
        print(f"{name}: {len(files)} files", *sorted(files), sep="\n  ")
    counts = {name: len(files) for name, files in entered.items()}
    assert {name: count for name, count in counts.items() if count > MOST_FILES[name]} == {}, counts
    loose = {name: count for name, count in counts.items() if count < MOST_FILES[name] * 0.75}
    assert loose == {}, f"lower the bounds: {counts}"


def test_the_store_enters_few_files(tmp_path):
    directory, memory = ChunkStore.open(tmp_path / "store"), ChunkStore.open("memory://")
    first, second = canonical(0, 4, 8), canonical(1, 4, 8)
    for store in (directory, memory):
        store.put(first)
    entered = {
        "put_many": _entered(lambda: directory.put_many([second])),
        "a hit": _entered(lambda: directory.get_canonical(CONTEXT, first.chunk_id)),
        "a hit in memory://": _entered(lambda: memory.get_canonical(CONTEXT, first.chunk_id)),
    }
    assert {name: len(files) for name, files in entered.items()} == MOST_STORE_FILES, entered


def test_no_product_code_asks_whether_a_test_runs_it():
    assert [n for n, path in _modules().items() if "pytest" in path.read_text(encoding="utf-8").lower()] == []


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    (built,) = WheelBuilder(str(TOP)).build(directory=str(folder), versions=["standard"])
    return Path(built)


def test_the_wheel_is_the_product_with_its_two_sets_of_weights(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"kamera", "kamera_kv-0.1.0.dist-info"}
    assert sorted(n for n in names if ".safetensors" in n) == [
        "kamera/testbed/weights/gqa/model.safetensors.xz",
        "kamera/testbed/weights/screen-reader/tower.safetensors.xz",
        "kamera/testbed/weights/screen-reader/updates.safetensors.xz",
    ]
    assert {
        "kamera/py.typed",
        "kamera/ops/kernels/serve.c",
        *(f"kamera/window/view/page.{kind}" for kind in ("html", "css", "js")),
        "kamera/cli/app.py",
    } <= set(names)


def test_the_wheel_stays_small(wheel):
    assert wheel.stat().st_size <= MOST_BYTES
