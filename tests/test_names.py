"""Names that docstrings tell are those of the package: none of a former name, none misspelt.

Single backticks are references, and double ones text. Nothing is imported. Pages: ``test_pages.py``.
"""

from __future__ import annotations

import builtins
import functools
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path

ELSEWHERE = {"Request.update_block_hashes", "cryptography", "flock"}
"""Names of other libraries."""

_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
TOP = Path(__file__).parents[1]


@functools.cache
def _codes() -> dict[str, types.CodeType]:
    """The files of package and benchmarks by their module, compiled: to walk a tree takes longer."""
    files = [path for folder in ("kamera", "benchmarks") for path in (TOP / folder).rglob("*.py")]
    names = [".".join(path.relative_to(TOP).with_suffix("").parts) for path in files]
    codes = [compile(path.read_text(encoding="utf-8"), path, "exec") for path in files]
    return {name.removesuffix(".__init__"): code for name, code in zip(names, codes, strict=True)}


def _inner(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code and all that are in it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _inner(inner)


@functools.cache
def _used(code: types.CodeType) -> set[str]:
    """Names in a code, and texts that are one word: fields, entries of JSON, choices."""
    found: set[str] = set()
    for inner in _inner(code):
        words = [inner.co_consts, *(each for each in inner.co_consts if isinstance(each, tuple | frozenset))]
        texts = [word for several in words for word in several if isinstance(word, str)]
        found |= {inner.co_name, *inner.co_names, *inner.co_varnames, *inner.co_cellvars}
        found |= {text for text in texts if text.isidentifier()}
    return found


@functools.cache
def _names() -> set[str]:
    """All names."""
    modules = {part for module in _codes() for part in module.split(".")}
    return modules.union(*map(_used, _codes().values()))


@functools.cache
def _members() -> dict[str, set[str]]:
    """Names in the body of each class, and of those that it names as its bases."""
    classes: dict[str, set[str]] = {}
    bases: dict[str, set[str]] = {}
    for code in _codes().values():
        for inner in _inner(code):
            if "__qualname__" in inner.co_names and inner.co_name.isidentifier():
                classes.setdefault(inner.co_name, set()).update(_used(inner))
    texts = [path.read_text(encoding="utf-8") for path in (TOP / "kamera").rglob("*.py")]
    for name, given in re.findall(r"^class (\w+)\(([^()]*)\)", "\n".join(texts), re.MULTILINE):
        bases.setdefault(name, set()).update(re.findall(r"\w+", given))

    def all_of(name: str) -> set[str]:
        others = (all_of(base) for base in bases.get(name, ()) if base != name)
        return classes.get(name, set()).union(*others)

    return {name: all_of(name) for name in classes}


def _is_known(name: str) -> bool:
    first, *rest = name.split(".")
    if first in ("kamera", "benchmarks"):
        return _is_reached(name)
    if rest and first in _members():
        return rest[0] in _members()[first]
    return {first, *rest} <= _names()


def _is_reached(name: str) -> bool:
    """True for a module, what it defines or imports, and a member of a class among that."""
    if name in _codes():
        return True
    module, _, inner = name.rpartition(".")
    if module in _codes():
        return inner in _used(_codes()[module])
    owner = module.rpartition(".")[2]
    return module.rpartition(".")[0] in _codes() and inner in _members().get(owner, ())


def test_every_reference_of_a_docstring_is_a_name_of_the_package():
    wrong = []
    for module, code in _codes().items():
        if module.split(".")[0] != "kamera":
            continue
        source = Path(code.co_filename).read_text(encoding="utf-8")
        others = {*re.findall(r"import (\w+)", source), *dir(builtins), *sys.stdlib_module_names} - {"kamera"}
        texts = re.findall(r'"""(.*?)"""', source, re.DOTALL)
        for span in (span for text in texts for span in _SPAN.findall(text)):
            name = span.removesuffix("()")
            is_other = name in ELSEWHERE or name.split(".")[0] in others
            if _NAME.fullmatch(name) and not is_other and not _is_known(name):
                wrong.append(f"{module}: `{span}`")
    assert wrong == []
