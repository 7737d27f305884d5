"""Verbs out of functions: a parameter that is a dataclass stands for an option per field."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

Made = TypeVar("Made")


def command(verb: Callable[..., None]) -> Callable[..., None]:
    """``verb`` as a command for typer. Dataclasses among its parameters are made of their fields' options.

    What must be given comes first, that of dataclasses before its own; of the rest, its own come first.
    """
    parameters = inspect.signature(verb, eval_str=True).parameters
    classes: dict[str, type[Any]] = {
        name: p.annotation for name, p in parameters.items() if _is_shared(p.annotation)
    }
    own = [p for name, p in parameters.items() if name not in classes]
    common = [option for cls in classes.values() for option in _options(cls)]
    options = [p for p in (*common, *own) if p.default is p.empty]
    options += [p for p in (*own, *common) if p.default is not p.empty]

    def run(**values: Any) -> None:
        values = {n: v.expanduser() if isinstance(v, Path) else v for n, v in values.items()}
        _check_output(values)
        instances = {name: make(cls, values) for name, cls in classes.items()}
        verb(**{p.name: values[p.name] for p in own}, **instances)

    functools.update_wrapper(run, verb, assigned=("__module__", "__name__", "__qualname__", "__doc__"))
    del run.__wrapped__  # type: ignore[attr-defined]  # typer must see this function's own parameters
    keywords = [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in options]
    run.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    run.__annotations__ = {option.name: option.annotation for option in options}
    return run


def _check_output(values: Mapping[str, Any]) -> None:
    """Raise ValueError if ``--output`` would replace a file that the verb reads."""
    output = values.get("output")
    if not isinstance(output, Path) or not output.exists():
        return
    for name, value in values.items():
        paths = value if isinstance(value, list) else [value]
        given = [Path(path) for path in paths if isinstance(path, str | Path)]
        if name != "output" and any(path.exists() and path.samefile(output) for path in given):
            raise ValueError(f"--output {output} is what is read: give another file")


def make(cls: type[Made], given: dict[str, Any]) -> Made:
    """A dataclass of options out of their values by name; dataclasses in it are made of the same values."""
    hints: dict[str, type[Any]] = get_type_hints(cls)
    return cls(**{n: make(kind, given) if _is_shared(kind) else given[n] for n, kind in hints.items()})


def _is_shared(kind: type[Any]) -> bool:
    return is_dataclass(kind)


def _options(cls: type[Any]) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(cls, include_extras=True)
    for field in fields(cls):
        if _is_shared(hints[field.name]):
            yield from _options(hints[field.name])
        else:
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            kind = inspect.Parameter.KEYWORD_ONLY
            yield inspect.Parameter(field.name, kind, default=default, annotation=hints[field.name])
