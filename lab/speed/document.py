"""Writes the tables of docs/results/speed.md from the results beside it: ``python -m lab.speed.document``.

Between ``<!-- NAME -->`` and ``<!-- /NAME -->`` the page is written by this program, everything else by
people. NAME is a benchmark, ``goals`` or ``files``. A benchmark's module may say in ``page(documents)``
which tables it wants there; otherwise every section of every result is shown. ``--check`` writes
nothing and fails if the page is not what the results say.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.speed.settings import NAMES
from lab.speed.table import GOALS, Section, machine_line, preset_line, shown

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
PAGE, FOLDER = RESULTS / "speed.md", RESULTS / "speed"

Document = Mapping[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite the page, or with ``--check`` say whether it holds what the results do."""
    parser = argparse.ArgumentParser(prog="python -m lab.speed.document", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is stale")
    args = parser.parse_args(arguments)
    held = PAGE.read_text(encoding="utf-8")
    made = rendered(held, load(FOLDER))
    if args.check:
        if made != held:
            print(f"{PAGE} is not what {FOLDER} says: run python -m lab.speed.document", file=sys.stderr)
        return int(made != held)
    PAGE.write_text(made, encoding="utf-8")
    return 0


def load(folder: Path) -> dict[str, Document]:
    """The results in a folder by file name, in the order of the names."""
    return {p.name: json.loads(p.read_text(encoding="utf-8")) for p in sorted(folder.glob("*.json"))}


def rendered(page: str, results: Mapping[str, Document]) -> str:
    """The page with every marked part written anew. Raises ValueError for a part that nothing fills."""

    def part(match: re.Match[str]) -> str:
        name = match["name"]
        return f"<!-- {name} -->\n{_part(name, results)}<!-- /{name} -->"

    return re.sub(r"<!-- (?P<name>[a-z]+) -->\n.*?<!-- /(?P=name) -->", part, page, flags=re.DOTALL)


def _part(name: str, results: Mapping[str, Document]) -> str:
    if name == "goals":
        return "".join(_markdown(section) for section in _goals(results))
    if name == "files":
        return "".join(_markdown(section) for section in _files(results))
    if name not in NAMES:
        raise ValueError(f"the page has a part {name!r}: it may be goals, files or one of {', '.join(NAMES)}")
    wanted = [d for d in results.values() if d["benchmark"] == name]
    if not wanted:
        return "\nNot measured yet.\n\n"
    module = importlib.import_module(f"lab.speed.{name}")
    page: Callable[[Sequence[Document]], Iterator[Section]] = getattr(module, "page", everything)
    notes = dict.fromkeys(note for d in wanted for note in d["notes"])
    return "".join(_markdown(s) for s in page(wanted)) + "".join(f"* {note}\n" for note in notes) + "\n"


def everything(documents: Sequence[Document]) -> Iterator[Section]:
    """Every section of every result, but its goals."""
    for document in documents:
        for section in document["sections"]:
            if section["title"] != GOALS:
                yield Section(f"{section['title']} ({preset_line(document)})", tuple(section["rows"]))


def _goals(results: Mapping[str, Document]) -> Iterator[Section]:
    rows = [
        {
            "goal": row["goal"],
            "wanted": f"≤ {shown(row['at most'])}" if "at most" in row else f"≥ {shown(row['at least'])}",
            "is": row["is"],
            "met": "met" if row["met"] else "**not met**",
            "with": preset_line(document),
            "file": _link(name),
        }
        for name, document in results.items()
        for section in document["sections"]
        if section["title"] == GOALS
        for row in section["rows"]
    ]
    yield Section("", tuple(rows))


def _files(results: Mapping[str, Document]) -> Iterator[Section]:
    yield Section(
        "",
        tuple(
            {
                "file": _link(name),
                "command": f"`{document['command']}`",
                "commit": document["commit"],
                "machine": machine_line(document),
            }
            for name, document in results.items()
        ),
    )


def _link(name: str) -> str:
    return f"[{name.removesuffix('.json')}](speed/{name})"


def _markdown(section: Section) -> str:
    title = f"\n**{section.title}**\n" if section.title else ""
    lines = ["| " + " | ".join(section.columns) + " |", "|" + "---|" * len(section.columns)]
    lines += [
        "| " + " | ".join(shown(row.get(column), spread=False) for column in section.columns) + " |"
        for row in section.rows
    ]
    return title + "\n" + "\n".join(lines) + "\n\n" if section.rows else title + "\nNothing measured.\n\n"


if __name__ == "__main__":
    sys.exit(main())
