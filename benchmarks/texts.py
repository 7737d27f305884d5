"""Documents of passages, out of the docstrings of what every machine has that runs Kamera.

A document is one module of the standard library, numpy, torch or transformers; its passages are consecutive
docstrings, each headed by the name that it explains, of 60 to 300 tokens. Sources are parsed, never imported,
so the same versions give the same documents; `digest` names them.
"""

from __future__ import annotations

import ast
import importlib.util
import random
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from inspect import cleandoc
from pathlib import Path

from kamera import ops

SHORTEST, LONGEST = 60, 300
"""Tokens of a passage."""

FOLDERS = {
    "numpy": ("_core", "lib", "linalg", "ma", "polynomial", "random"),
    "torch": ("distributions", "nn/modules", "nn/utils", "optim", "utils/data"),
    "transformers": (".", "generation", "utils"),
}
"""Folders whose modules make documents, beside the standard library's own modules."""

Tokenize = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class Document:
    """A module's docstrings: ``passages`` in the order of the source."""

    name: str
    passages: tuple[str, ...]


def documents(count: int, tokenize: Tokenize, *, passages: int, longest: int = LONGEST) -> list[Document]:
    """``count`` documents of exactly ``passages`` passages of `SHORTEST` to ``longest`` tokens each.

    The packages take turns, in a fixed order that mixes modules. Raises ValueError if there are too few.
    """
    by_package = [_mix(package, modules) for package, modules in _modules().items()]
    found: list[Document] = []
    while by_package and len(found) < count:
        for modules in list(by_package):
            for name, path in modules:
                texts = _passages(name, path, tokenize, passages, longest)
                if len(texts) == passages:
                    found.append(Document(name, tuple(texts)))
                    break
            else:
                by_package.remove(modules)
    if len(found) < count:
        raise ValueError(f"{len(found)} documents of {passages} passages are installed here, not {count}")
    return found[:count]


def digest(found: Sequence[Document]) -> str:
    """What the figures of these documents can be compared by."""
    return ops.digest("documents", *(text for document in found for text in document.passages))[:16]


def _modules() -> dict[str, list[tuple[str, Path]]]:
    """Name and source of each module, by package."""
    standard = Path(sysconfig.get_paths()["stdlib"])
    found = {"python": [(p.stem, p) for p in standard.glob("*.py")]}
    for package, folders in FOLDERS.items():
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            continue
        top = Path(spec.submodule_search_locations[0])
        paths = [path for folder in folders for path in (top / folder).glob("*.py")]
        found[package] = [(".".join((package, *p.relative_to(top).with_suffix("").parts)), p) for p in paths]
    return found


def _mix(package: str, modules: list[tuple[str, Path]]) -> Iterator[tuple[str, Path]]:
    modules = sorted(modules)
    random.Random(package).shuffle(modules)
    return iter(modules)


def _passages(name: str, path: Path, tokenize: Tokenize, count: int, longest: int) -> list[str]:
    """The first ``count`` passages of a module, fewer if it has no more."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return []
    found: list[str] = []
    seen: set[str] = set()
    for title, doc in _docstrings(tree, name):
        passage = _cut(f"{title}: {doc}", tokenize, longest)
        if passage is not None and doc not in seen:
            seen.add(doc)
            found.append(passage)
            if len(found) == count:
                break
    return found


def _docstrings(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
        text = ast.get_docstring(node, clean=False)
        if text:
            yield name, re.sub(r"\n{3,}", "\n\n", cleandoc(text))
        for child in node.body:
            if isinstance(child, ast.ClassDef | ast.FunctionDef):
                yield from _docstrings(child, f"{name}.{child.name}")


def _cut(text: str, tokenize: Tokenize, longest: int) -> str | None:
    """Whole paragraphs of a text, as many as fit; None if they are too short."""
    paragraphs = text.split("\n\n")
    for end in range(len(paragraphs), 0, -1):
        whole = "\n\n".join(paragraphs[:end])
        if len(whole) > 8 * longest:
            continue
        tokens = len(tokenize(whole))
        if tokens <= longest:
            return whole if tokens >= SHORTEST else None
    return None
