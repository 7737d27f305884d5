"""Blocks: what is kept of every decoder layer, those of equal layers in one piece.

Models have few kinds of layers: most one, some two (sliding and full ones). So the number of blocks, and with
it the number of calls that an operation makes, does not grow with a model's depth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Generic, TypeVar, overload

Part = TypeVar("Part")

Groups = tuple[tuple[int, ...], ...]
"""The decoder layers of each block, ascending; together all layers, each once."""


class Blocks(Sequence[Mapping[str, Part]], Generic[Part]):
    """Parts of all layers by channel: ``parts[g]`` maps a channel to the parts of the layers ``groups[g]``.

    A part holds its layers along its first axis: ``part[n]`` is that of the n-th layer of the group. As a
    sequence it has one item for each decoder layer, in order: channel -> that layer's part, a view. A layer
    without KV has no channels. Two `Blocks` are the same source only if they are the same object.
    """

    def __init__(self, parts: Sequence[Mapping[str, Part]], groups: Groups) -> None:
        if len(parts) != len(groups):
            raise ValueError(f"{len(parts)} blocks for {len(groups)} groups of layers")
        self.parts: tuple[Mapping[str, Part], ...] = tuple(parts)
        self.groups = groups

    def contents(self) -> Iterator[Any]:
        """All that it keeps in memory: its parts, or the tensors that they are made of."""
        for block in self.parts:
            yield from block.values()

    def __len__(self) -> int:
        return len(_places(self.groups))

    @overload
    def __getitem__(self, index: int) -> Mapping[str, Part]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Mapping[str, Part]]: ...
    def __getitem__(self, index: int | slice) -> Mapping[str, Part] | Sequence[Mapping[str, Part]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        group, row = _places(self.groups)[index]
        return {name: _row(part, row) for name, part in self.parts[group].items()}

    def __iter__(self) -> Iterator[Mapping[str, Part]]:
        for group, row in _places(self.groups):
            yield {name: _row(part, row) for name, part in self.parts[group].items()}

    def __repr__(self) -> str:
        held = ", ".join(f"{len(g)} x {sorted(p)}" for p, g in zip(self.parts, self.groups, strict=True))
        return f"{type(self).__name__}({held})"


def check_groups(groups: object) -> Groups:
    """Groups out of JSON. Raises ValueError for any that do not name each layer once."""
    if isinstance(groups, list) and all(isinstance(g, list) and g and sorted(g) == g for g in groups):
        named = sorted(layer for group in groups for layer in group)
        if named == list(range(len(named))) and all(type(layer) is int for layer in named):
            return tuple(tuple(group) for group in groups)
    raise ValueError(f"{str(groups)[:80]} are not groups that name each layer once")


def equal_groups(kinds: Sequence[Any]) -> Groups:
    """The groups of layers that are of equal kinds, in the order of their first layers."""
    found: list[tuple[Any, list[int]]] = []
    for layer, kind in enumerate(kinds):
        for other, layers in found:
            if other is kind or other == kind:
                layers.append(layer)
                break
        else:
            found.append((kind, [layer]))
    return tuple(tuple(layers) for _, layers in found)


def blocks_map(blocks: Blocks[Any], function: Callable[[Any], Any]) -> Blocks[Any]:
    """Apply ``function`` to every part, all layers of a block at once."""
    return Blocks([{n: function(part) for n, part in block.items()} for block in blocks.parts], blocks.groups)


@lru_cache(maxsize=64)
def _places(groups: Groups) -> tuple[tuple[int, int], ...]:
    """The group and the row in it of each layer."""
    found = {layer: (g, row) for g, layers in enumerate(groups) for row, layer in enumerate(layers)}
    return tuple(found[layer] for layer in range(len(found)))


def _row(part: Any, row: int) -> Any:
    return part[row]
