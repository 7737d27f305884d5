"""``python -m lab.reliability NAME``: run one of them, print its figures and where they come from."""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import pkgutil
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.speed.machine import commit, machine

_HERE = Path(__file__).resolve().parent
_RUNNABLE = re.compile(r"^SIZE\b", re.MULTILINE)


def names() -> list[str]:
    """The modules of this package that can be run."""
    found = (module.name for module in pkgutil.iter_modules([str(_HERE)]))
    # told from the text, as importing them all would take seconds
    return sorted(n for n in found if _RUNNABLE.search((_HERE / f"{n}.py").read_text(encoding="utf-8")))


def measure(name: str, size: int | None, seed: int, **more: int) -> dict[str, Any]:
    """The figures of ``name`` with the command, the commit and the machine that made them."""
    module = importlib.import_module(f"lab.reliability.{name}")
    size = module.SIZE if size is None else size
    start = time.monotonic()
    results = module.run(size, seed, **more)
    return {
        "name": name,
        "size": size,
        "seed": seed,
        "results": results,
        "seconds": round(time.monotonic() - start, 1),
        "command": " ".join(
            [f"python -m lab.reliability {name} --size {size} --seed {seed}"]
            + [f"--{option} {value}" for option, value in more.items()]
        ),
        "commit": commit(),
        "machine": machine(),
    }


def table(document: Mapping[str, Any]) -> str:
    """The same for people: a figure a line."""
    where = ", ".join(f"{name} {value}" for name, value in document["machine"].items())
    lines = [f"{document['command']}  ({document['seconds']} s)", f"commit {document['commit']}; {where}"]
    rows = list(_flat("", document["results"]))
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(lines + [f"  {name:<{width}}  {value}" for name, value in rows])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; 1 where an attack has findings."""
    parser = argparse.ArgumentParser(prog="python -m lab.reliability", description=__doc__)
    parser.add_argument("name", choices=names())
    parser.add_argument(
        "--size", "--operations", type=int, help="how much of it; what it counts is said in the module"
    )
    parser.add_argument("--threads", type=int, help="how many threads (of `threads` only)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--format", choices=("table", "json"), default="table")
    parser.add_argument("--output", type=Path, help="write there instead of to stdout")
    asked = parser.parse_args(arguments)
    more = {} if asked.threads is None else {"threads": asked.threads}
    if more and asked.name != "threads":
        parser.error("--threads is for the program threads")
    document = measure(asked.name, asked.size, asked.seed, **more)
    if asked.format == "json":
        text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
    else:
        text = table(document)
    if asked.output is None:
        print(text)
    else:
        asked.output.write_text(text + "\n", encoding="utf-8")
        print(f"wrote {asked.output}", file=sys.stderr)
    return 1 if document["results"].get("findings") else 0


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _flat(f"{prefix} · {name}" if prefix else str(name), inner)
    else:
        yield prefix, value


if __name__ == "__main__":
    logging.getLogger("kamera").setLevel(logging.ERROR)  # damage is what is asked for here
    sys.exit(main())
