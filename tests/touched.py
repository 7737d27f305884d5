"""Run the tests that a change touches: ``python -m tests.touched [BASE] [--list] [-- PYTEST…]``.

A change is what differs from the commit where ``BASE`` was left (by default the last commit), files
that git does not know yet included. It touches a test file that imports it, through any number of modules,
one below a changed ``conftest.py``, and one that names a changed file which is no module. What is set for
all (`EVERYTHING`) touches every test.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import grimp

from tests import costs

TOP = Path(__file__).parents[1]
EVERYTHING = ("pyproject.toml", "constraints.txt", "tests/conftest.py")
_QUOTED = re.compile(r"""["'](\w+(?:\.\w+)+)[:"']""")
READERS = ("tests.test_house",)
"""Tests that read every file."""


def touched(changed: Collection[str]) -> list[str]:
    """Test files that a change of these files touches; all paths are from the top of the repository."""
    graph = _graph()
    tests = set(filter(_is_test, graph.modules))
    if any(path in EVERYTHING for path in changed):
        return sorted(map(_path, tests))
    others = [Path(path).name for path in changed if not path.endswith(".py")]
    named = {name for name in graph.modules if any(other in _text(name) for other in others)}
    found = {*READERS} if changed else set()
    for name in (named | {_module(path) for path in changed}) & graph.modules:
        found |= {name, *graph.find_downstream_modules(name)}
    return sorted(map(_path, found & tests))


def changes(base: str) -> list[str]:
    """Files that differ from the commit where ``base`` was left, and new ones."""
    (fork,) = _git("merge-base", base, "HEAD")
    new = _git("ls-files", "--others", "--exclude-standard")
    return sorted({*_git("diff", "--name-only", "--no-renames", fork), *new})


def main(given: list[str]) -> int:
    """Run or list the touched tests; the exit code of pytest."""
    own, theirs = (
        (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    )
    parser = argparse.ArgumentParser(prog="python -m tests.touched")
    parser.add_argument("base", nargs="?", default="HEAD", help="commit or branch; default: the last commit")
    parser.add_argument("--list", action="store_true", help="print the files and run nothing")
    asked = parser.parse_args(own)
    files, table = touched(changes(asked.base)), costs.table()
    if asked.list:
        print(*files, sep="\n")
    seconds = sum(table[name].seconds for name in files if name in table)
    print(f"{len(files)} test files, about {seconds:.0f} processor seconds", file=sys.stderr)
    if asked.list or not files:
        return 0
    return subprocess.run([sys.executable, "-m", "pytest", *theirs, *files], cwd=TOP).returncode


# -- the graph ---------------------------------------------------------------------------------


def _graph() -> grimp.ImportGraph:
    """Who imports whom, with imports that only a name in quotes or a folder tells."""
    graph = grimp.build_graph("kamera", "lab", "tests", cache_dir=None)
    rooms = {alias.name: node.module for node in _imports("kamera") for alias in node.names if node.module}
    for name in graph.find_modules_that_directly_import("kamera"):
        # names of the front door stand for their rooms: importing one does not touch the others
        nodes = [node for node in _imports(name) if node.module == "kamera"]
        wanted = {alias.name for node in nodes for alias in node.names}
        if wanted and wanted <= rooms.keys():
            graph.remove_import(importer=name, imported="kamera")
            for room in {rooms[one] for one in wanted}:
                graph.add_import(importer=name, imported=room)
    for name in sorted(graph.modules):
        for quoted in _quoted(name):
            if quoted in graph.modules and quoted != name:
                graph.add_import(importer=name, imported=quoted)
        for folder in _folders(name) if _is_test(name) else ():
            if f"{folder}.conftest" in graph.modules:
                graph.add_import(importer=name, imported=f"{folder}.conftest")
    return graph


def _imports(module: str) -> list[ast.ImportFrom]:
    tree = ast.parse(_text(module))
    return [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level]


def _quoted(module: str) -> list[str]:
    """Texts that may be names of modules: ``"lab.speed"``, ``"kamera.cli.store:ls"``."""
    return _QUOTED.findall(_text(module))


def _is_test(module: str) -> bool:
    return module.rpartition(".")[2].startswith("test_")


def _folders(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _path(module: str) -> str:
    folder = TOP.joinpath(*module.split("."))
    return (
        (folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")).relative_to(TOP).as_posix()
    )


def _text(module: str) -> str:
    return (TOP / _path(module)).read_text(encoding="utf-8")


def _git(*given: str) -> list[str]:
    return subprocess.run(
        ["git", *given], cwd=TOP, capture_output=True, text=True, check=True
    ).stdout.splitlines()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
