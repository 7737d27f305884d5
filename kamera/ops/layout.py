"""Layer layouts: the channels of a layer's cache, each free or phased.

The layout is data, not code: MHA, GQA, MQA, MLA and DSA differ only in their channels, and all other code
distinguishes only free and phased channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kamera.ops.kv import KV, Blocks, Groups, equal_groups
from kamera.ops.rope import RopeSpec, relocate

Family = Literal["MHA", "GQA", "MQA", "MLA", "MLA_EXPANDED", "NONE"]
CacheTensor = Literal["keys", "values", "indexer_keys"]
"""The tensors of a layer in a cache of transformers."""


@dataclass(frozen=True)
class Channel:
    """One cached tensor of a layer, ``[heads, tokens, dim]``.

    ``tensor`` is the attribute of the live cache layer that holds it. ``rope`` is None for a free
    channel; a phased one turns features ``rotary_start : rotary_start + rope.rotary_dim``.
    """

    name: str
    tensor: CacheTensor
    heads: int
    dim: int
    rope: RopeSpec | None = None
    rotary_start: int = 0

    @property
    def features(self) -> int:
        """Features per token with heads flattened."""
        return self.heads * self.dim


@dataclass(frozen=True)
class LayerLayout:
    """The channels of one decoder layer; empty for a layer that reads another layer's KV."""

    family: Family
    channels: tuple[Channel, ...]

    def channel(self, name: str) -> Channel:
        """The channel called ``name``."""
        for channel in self.channels:
            if channel.name == name:
                return channel
        raise ValueError(f"no channel {name!r}: this layer has {[c.name for c in self.channels]}")


Layout = Sequence[LayerLayout]
"""All layers, in decoder order."""


def attention_layout(
    heads: int, query_heads: int, key_dim: int, value_dim: int, rope: RopeSpec | None
) -> LayerLayout:
    """MHA, GQA or MQA: phased K, free V."""
    family: Family = "MHA" if heads == query_heads else "MQA" if heads == 1 else "GQA"
    return LayerLayout(
        family,
        (Channel("k", "keys", heads, key_dim, rope), Channel("v", "values", heads, value_dim)),
    )


def mla_latent_layout(
    latent_dim: int, rope: RopeSpec, indexer: tuple[int, int, RopeSpec] | None = None
) -> LayerLayout:
    """MLA with a latent cache: ``keys`` = free c_kv, ``values`` = phased k_pe.

    ``indexer`` adds the indexer keys of DeepSeek sparse attention: (heads, dim, phase).
    """
    channels = [
        Channel("c_kv", "keys", 1, latent_dim),
        Channel("k_pe", "values", 1, rope.rotary_dim, rope),
    ]
    if indexer is not None:
        heads, dim, indexer_rope = indexer
        channels.append(Channel("k_idx", "indexer_keys", heads, dim, indexer_rope))
    return LayerLayout("MLA", tuple(channels))


def mla_expanded_layout(heads: int, nope_dim: int, value_dim: int, rope: RopeSpec) -> LayerLayout:
    """MLA with expanded K and V in the cache: only the tail of K past ``nope_dim`` is phased."""
    return LayerLayout(
        "MLA_EXPANDED",
        (
            Channel("k", "keys", heads, nope_dim + rope.rotary_dim, rope, rotary_start=nope_dim),
            Channel("v", "values", heads, value_dim),
        ),
    )


def layer_groups(layout: Layout, kinds: Sequence[object] | None = None) -> Groups:
    """The groups of layers that make a block: those of equal channels, and of equal ``kinds`` if given."""
    apart = kinds or [None] * len(layout)
    return equal_groups([(spec.channels, kind) for spec, kind in zip(layout, apart, strict=True)])


def relocate_kv(kv: KV, layout: Layout, offset: Sequence[int]) -> KV:
    """Move a span by ``offset`` positions per axis. Free channels are shared with the input."""
    check_kv(kv, layout)
    return Blocks(
        [
            {
                c.name: block[c.name]
                if c.rope is None
                else relocate(block[c.name], c.rope, offset, rotary_start=c.rotary_start)
                for c in layout[layers[0]].channels
            }
            for block, layers in zip(kv.parts, kv.groups, strict=True)
        ],
        kv.groups,
    )


def rotated_bytes(kv: KV, layout: Layout) -> int:
    """Bytes that a relocation of ``kv`` writes: those of its phased channels."""
    return sum(
        block[c.name].nbytes
        for block, layers in zip(kv.parts, kv.groups, strict=True)
        for c in layout[layers[0]].channels
        if c.rope is not None
    )


def check_kv(kv: KV, layout: Layout) -> None:
    """Raise ValueError unless ``kv`` has exactly the layers and channels of ``layout``."""
    check_layers(kv.groups, layout)
    tokens = None
    for block, layers in zip(kv.parts, kv.groups, strict=True):
        channels = layout[layers[0]].channels
        names = {c.name for c in channels}
        if block.keys() != names:
            raise ValueError(f"layer {layers[0]} has channels {sorted(block)}, expected {sorted(names)}")
        for c in channels:
            shape = tuple(block[c.name].shape)
            tokens = shape[2] if tokens is None and len(shape) == 4 else tokens
            if shape != (len(layers), c.heads, tokens, c.dim):
                raise ValueError(
                    f"layer {layers[0]} channel {c.name}: shape {shape[1:]}, "
                    f"expected ({c.heads}, {tokens}, {c.dim})"
                )


def check_layers(groups: Groups, layout: Layout) -> None:
    """Raise ValueError unless ``groups`` are all layers of ``layout``, each with layers of equal channels."""
    held = sum(map(len, groups))
    if held != len(layout):
        raise ValueError(f"KV of {held} layers does not fit a layout of {len(layout)}")
    for layers in groups:
        first = layout[layers[0]].channels
        if [layout[layer].channels for layer in layers].count(first) != len(layers):
            raise ValueError(f"layers {list(layers)} of the layout are not equal: they are not one block")
