"""The KV of a span of tokens, outside any cache: blocks of channels, those of equal layers in one piece.

Models have few kinds of layers: most one, some two (sliding and full ones). So the number of blocks, and with
it the number of calls that an operation makes, does not grow with a model's depth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Generic, TypeVar, overload

import torch

from kamera.errors import NonFiniteKV

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


@lru_cache(maxsize=64)
def _places(groups: Groups) -> tuple[tuple[int, int], ...]:
    """The group and the row in it of each layer."""
    found = {layer: (g, row) for g, layers in enumerate(groups) for row, layer in enumerate(layers)}
    return tuple(found[layer] for layer in range(len(found)))


def _row(part: Any, row: int) -> Any:
    return part[row]


LayerKV = Mapping[str, torch.Tensor]
"""One layer: channel name -> ``[heads, tokens, dim]``."""

KV = Blocks[torch.Tensor]
"""All layers: channel -> ``[layers, heads, tokens, dim]`` for each group of equal layers."""

NO_KV: KV = Blocks((), ())
"""The KV of no layer."""


def kv_of(layers: Sequence[LayerKV], groups: Groups | None = None) -> KV:
    """Blocks of layers in decoder order, which are copied.

    ``groups`` defaults to layers of the same channels, shapes, dtypes and devices. Raises ValueError for
    groups of layers that differ.
    """
    if groups is None:
        groups = equal_groups(
            [[(n, t.shape, t.dtype, t.device) for n, t in layer.items()] for layer in layers]
        )
    parts: list[LayerKV] = []
    for group in groups:
        first = layers[group[0]]
        if any(layers[i].keys() != first.keys() for i in group):
            raise ValueError(f"layers {list(group)} do not have the same channels: they are not one block")
        parts.append({name: torch.stack([layers[i][name] for i in group]) for name in first})
    return Blocks(parts, groups)


def regroup(kv: KV, groups: Groups) -> KV:
    """``kv`` in other groups: itself if they are its own, else a copy."""
    return kv if kv.groups == groups else kv_of(list(kv), groups)


def kv_tensors(kv: KV) -> Iterator[torch.Tensor]:
    """The tensors that a KV keeps in memory: its blocks, or their codes; nothing that stands elsewhere."""
    return kv.contents()


def kv_tokens(kv: KV) -> int:
    """Number of tokens of the span (0 if no layer holds KV)."""
    told: int | None = getattr(kv, "tokens", None)  # one whose parts are made at each read
    if told is not None:
        return told
    for block in kv.parts:
        for tensor in block.values():
            return tensor.shape[2]
    return 0


def kv_bytes(kv: KV) -> int:
    """Bytes of all channels of all layers."""
    return sum([t.nbytes for block in kv.parts for t in block.values()])


def kv_map(kv: KV, function: Callable[[torch.Tensor], torch.Tensor]) -> KV:
    """Apply ``function`` to every block ``[layers, heads, tokens, dim]`` and keep the structure."""
    return Blocks([{n: function(t) for n, t in block.items()} for block in kv.parts], kv.groups)


def kv_slice(kv: KV, start: int, stop: int) -> KV:
    """Views of the tokens ``start:stop``."""
    return Blocks([{n: t[:, :, start:stop] for n, t in block.items()} for block in kv.parts], kv.groups)


def kv_copy(kv: KV) -> KV:
    """A copy that shares no memory with ``kv`` and has no gradient."""
    return Blocks([{n: t.detach().clone() for n, t in block.items()} for block in kv.parts], kv.groups)


def kv_concat(spans: Sequence[KV]) -> KV:
    """Join spans of the same layout along the token axis (copies)."""
    if not spans:
        raise ValueError("kv_concat needs at least one span, got none")
    groups = spans[0].groups
    spans = [regroup(span, groups) for span in spans]
    return Blocks(
        [
            {n: torch.cat([span.parts[g][n] for span in spans], dim=2) for n in spans[0].parts[g]}
            for g in range(len(groups))
        ],
        groups,
    )


def kv_distance(kv: KV, reference: KV) -> float:
    """Relative L2 distance of ``kv`` from ``reference``: the largest of all layers and channels.

    NaN if any of them is; 0.0 for spans without tokens.
    """
    worst = 0.0
    for block, wanted in zip(regroup(kv, reference.groups).parts, reference.parts, strict=True):
        for name, want in wanted.items():
            true = want.double()
            lost, whole = (
                torch.linalg.vector_norm(x, dim=(1, 2, 3)) for x in (block[name].double() - true, true)
            )
            apart = float((lost / whole.clamp_min(1e-30)).max())
            worst = apart if not apart <= worst else worst
    return worst


def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """True if no tensor holds a NaN or an infinity; integers hold none.

    Takes one sum per tensor, which is not finite if any entry is not, and one synchronisation per device.
    Entries are checked one by one only if the sum overflows.
    """
    given = [t for t in tensors if t.is_floating_point()]
    sums: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in given:
        sums.setdefault(tensor.device, []).append(tensor.sum(dtype=torch.float32))
    if all(bool(torch.stack(some).isfinite().all()) for some in sums.values()):
        return True
    return all(bool(tensor.isfinite().all()) for tensor in given)


def check_finite(kv: KV) -> None:
    """Raise NonFiniteKV for KV of a forward, naming the first layer, channel and token."""
    if all_finite([tensor for block in kv.parts for tensor in block.values()]):
        return
    for i, layer in enumerate(kv):
        for name, tensor in layer.items():
            bad = (~tensor.isfinite()).any(2).any(0).nonzero()
            if bad.numel():
                raise NonFiniteKV(
                    f"the forward gave KV that is not finite (layer {i}, channel {name}, token {int(bad[0])} "
                    f"of {tensor.shape[1]}, {_short(tensor)}): {_advice(tensor)}"
                )


def check_encoding(tensors: Mapping[str, torch.Tensor], chunk: str) -> None:
    """Raise NonFiniteKV for the encoding of a chunk, naming chunk and tensor."""
    if all_finite(tensors.values()):
        return
    name = next(n for n, t in tensors.items() if not all_finite([t]))
    raise NonFiniteKV(
        f"the encoding of chunk {chunk[:12]} is not finite ({name}, {_short(tensors[name])}): "
        f"look for NaN or inf in its pixels; {_advice(tensors[name])}"
    )


def check_deficit(x: torch.Tensor) -> None:
    """Raise NonFiniteKV for deficits that cannot be factored."""
    if not all_finite([x]):
        raise NonFiniteKV(f"a deficit of shape {tuple(x.shape)} is not finite: form it from finite KV")


def _short(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _advice(tensor: torch.Tensor) -> str:
    if tensor.dtype == torch.float16:
        return "float16 ends at 65504, load the model in bfloat16 or float32"
    return "look for NaN or inf in the weights and in the antecedents"
