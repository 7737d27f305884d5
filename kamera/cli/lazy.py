"""Groups of commands that list themselves without importing a command's module."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group


@dataclass(frozen=True)
class Verb:
    """A command: its location ``module:name``, a function or a Typer, whose ``help`` has to be given."""

    where: str
    text: str = ""

    @property
    def help(self) -> str:
        """The first paragraph of its help, read from the source: to import a command takes seconds."""
        module, _, attribute = self.where.partition(":")
        spec = None if self.text else find_spec(module)
        if spec is None or spec.origin is None:
            return self.text
        nodes = ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body
        function = next(n for n in nodes if isinstance(n, ast.FunctionDef) and n.name == attribute)
        return " ".join((ast.get_docstring(function) or "").split("\n\n")[0].split())

    def load(self, name: str) -> Any:
        """The command under the name ``name``; imports its module."""
        module, _, attribute = self.where.partition(":")
        verb = getattr(import_module(module), attribute)
        holder = typer.Typer(add_completion=False, rich_markup_mode=None)  # help has [lists] and {objects}
        if isinstance(verb, typer.Typer):
            holder.add_typer(verb, name=name, help=self.text)
        else:
            holder.command(name)(verb)
        return get_group(holder).commands[name]


class LazyGroup(TyperGroup):
    """A group with help from a table; it imports a command only to call it."""

    verbs: ClassVar[Mapping[str, Verb]] = {}

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {name: TyperCommand(name) for name in self.verbs}
        self._command_by_name: dict[str, Any] = {}

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command to run; None for a name outside the table."""
        if cmd_name in self.verbs and cmd_name not in self._command_by_name:
            self._command_by_name[cmd_name] = self.verbs[cmd_name].load(cmd_name)
        return self._command_by_name.get(cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """The list of commands, from the table alone: each with the whole of its sentence."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, verb.help) for name, verb in self.verbs.items()])


def group(verbs: Mapping[str, Verb]) -> type[LazyGroup]:
    """The ``cls`` of a `typer.Typer` with these commands."""
    return type("LazyGroup", (LazyGroup,), {"verbs": verbs})
