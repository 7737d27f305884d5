"""The code of functions: its digest, what it may read, and whether it is a library's own."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy
import torch

from kamera.ops import digest

_HERE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_ROOTS = (*(os.path.dirname(m.__file__ or "") + os.sep for m in (torch, numpy)), _HERE)
_STANDARD = os.path.dirname(os.__file__) + os.sep
_INSTALLED = ("site-packages", "dist-packages")
_PACKAGES = frozenset({"torch", "numpy", "kamera", "builtins", *sys.stdlib_module_names})

_NUMERIC = (
    "transformers.models.",
    "transformers.masking_utils",
    "transformers.modeling_rope_utils",
    "transformers.activations",
    "transformers.pytorch_utils",
    "peft.tuners.",
)
"""Modules of `_LOADING` whose functions are followed into the globals they read; of the others, which load
or generate, a function counts by its own code alone."""

_LOADING = ("transformers.", "peft.", "accelerate.")


def name_of(value: Any) -> str:
    """A function, method or object by its qualified name, never by its address."""
    if isinstance(value, functools.partial):
        return name_of(value.func)
    definition = value if hasattr(value, "__qualname__") else type(value)
    return f"{getattr(definition, '__module__', '')}.{definition.__qualname__}"


def is_librarys(value: Any) -> bool:
    """True for a function or class of torch, NumPy, Python or Kamera that is where its code was written.

    A function is judged by the file of its code: neither a copied name nor a swapped ``__code__`` hides it.
    """
    if isinstance(value, FunctionType):
        return _is_in_library(value.__code__.co_filename)
    if isinstance(value, BuiltinFunctionType):
        return True
    module = value.__module__ if isinstance(value, type) else type(value).__module__
    return str(module).partition(".")[0] in _PACKAGES


def is_transformers(function: FunctionType) -> bool:
    """True if the code of a function is in a file of transformers."""
    return f"{os.sep}transformers{os.sep}" in function.__code__.co_filename


def includes_dependencies(module: str) -> bool:
    """True if functions and classes of a module count with what they use, and not by their own code alone."""
    if not module.startswith(_LOADING):
        return True
    return module.startswith(_NUMERIC) and not module.startswith("transformers.models.auto.")


@functools.lru_cache(maxsize=8192)
def code_digest(code: CodeType) -> str:
    """Digest of bytecode, constants and names, without files and lines: equal in processes of one Python."""
    constants = [code_digest(c) if isinstance(c, CodeType) else _constant(c) for c in code.co_consts]
    facts = (
        code.co_argcount,
        code.co_posonlyargcount,
        code.co_kwonlyargcount,
        code.co_flags,
        code.co_names,
        code.co_varnames,
        code.co_freevars,
        code.co_cellvars,
        getattr(code, "co_exceptiontable", b""),
    )
    return digest("kamera.code.v1", code.co_code, repr(facts), *constants)


@functools.lru_cache(maxsize=8192)
def names_in(code: CodeType) -> frozenset[str]:
    """All names of globals and attributes in a code and those nested in it."""
    inner_names = (names_in(c) for c in code.co_consts if isinstance(c, CodeType))
    return frozenset(code.co_names).union(*inner_names)


def references(function: FunctionType) -> Iterator[tuple[Mapping[str, Any], str]]:
    """``(namespace, name)`` of what a function may read: globals, and attributes of modules among them."""
    names = sorted(names_in(function.__code__))
    spaces: list[Mapping[str, Any]] = [function.__globals__]
    space_ids: set[int] = set()
    while spaces:
        space = spaces.pop()
        if id(space) in space_ids:
            continue
        space_ids.add(id(space))
        for name in names:
            if name in space:
                yield space, name
                if isinstance(space[name], ModuleType):
                    spaces.append(vars(space[name]))


def _constant(value: Any) -> str:
    if isinstance(value, frozenset):  # its order is not that of another process
        return f"{{{', '.join(sorted(map(_constant, value)))}}}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_constant, value))})"
    return repr(value)


def _is_in_library(file: str) -> bool:
    if file.startswith(_ROOTS) or file.startswith("<frozen "):
        return True
    return file.startswith(_STANDARD) and not any(part in file for part in _INSTALLED)
