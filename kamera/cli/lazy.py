"""Groups of commands that list themselves without importing a command's module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group


@dataclass(frozen=True)
class Verb:
    """A command (a function or a Typer): its location ``module:name``, and the first line of its help."""

    where: str
    help: str

    def load(self, name: str) -> Any:
        """The command under the name ``name``; imports its module."""
        module, _, attribute = self.where.partition(":")
        found = getattr(import_module(module), attribute)
        holder = typer.Typer(add_completion=False, rich_markup_mode=None)  # help has [lists] and {objects}
        if isinstance(found, typer.Typer):
            holder.add_typer(found, name=name)
        else:
            holder.command(name)(found)
        return get_group(holder).commands[name]


class LazyGroup(TyperGroup):
    """A group with help from a table; it imports a command only to call it."""

    verbs: ClassVar[Mapping[str, Verb]] = {}

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {name: TyperCommand(name, help=verb.help) for name, verb in self.verbs.items()}
        self._loaded: dict[str, Any] = {}

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command to run; None for a name outside the table."""
        if cmd_name in self.verbs and cmd_name not in self._loaded:
            self._loaded[cmd_name] = self.verbs[cmd_name].load(cmd_name)
        return self._loaded.get(cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """The list of commands, from the table alone."""
        TyperGroup(name=self.name, commands=dict(self.commands)).format_commands(ctx, formatter)


def group(verbs: Mapping[str, Verb]) -> type[LazyGroup]:
    """The ``cls`` of a `typer.Typer` with these commands."""
    return type("LazyGroup", (LazyGroup,), {"verbs": verbs})
