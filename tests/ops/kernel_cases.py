"""Cases for every path of the fused operator, and the float64 reference they are held against."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st

from kamera.ops import (
    KV,
    Blocks,
    Channel,
    CodedKV,
    LayerKV,
    LayerLayout,
    LowRank,
    Patch,
    RopeSpec,
    attention_layout,
    code_kv,
    floats,
    kv_of,
    kv_slice,
    layer_groups,
    mla_expanded_layout,
    mla_latent_layout,
)
from tests.ops.coded import coded

PAIRINGS = ("half", "interleaved")


@dataclass(frozen=True, eq=False)
class Case:
    """One call of `serve`, but for where it writes."""

    layout: list[LayerLayout]
    source: KV
    patch: Patch | None
    offset: tuple[int, ...]
    phased_only: bool
    dtype: torch.dtype
    tokens: int

    def written(self) -> list[tuple[int, Channel]]:
        """The channels that are to be written."""
        channels = [(i, c) for i, spec in enumerate(self.layout) for c in spec.channels]
        return [(i, c) for i, c in channels if c.rope is not None or not self.phased_only]


def rope(pairs: int, pairing: str = "half", num_axes: int = 1) -> RopeSpec:
    return RopeSpec(
        tuple(100.0 ** (-i / max(pairs, 1)) for i in range(pairs)),
        tuple(i % num_axes for i in range(pairs)),
        num_axes,
        pairing,
    )


def layouts(pairing: str, num_axes: int) -> dict[str, list[LayerLayout]]:
    """Every family, with partial and offset rotary parts, odd widths, and a layer that keeps nothing."""
    small, wide = rope(4, pairing, num_axes), rope(32, pairing, num_axes)
    other = rope(3, "half" if pairing == "interleaved" else "interleaved", num_axes)
    return {
        "gqa": [LayerLayout("NONE", ()), *[attention_layout(2, 4, 64, 70, wide)] * 2],
        "partial": [attention_layout(3, 3, 13, 9, small)],
        "mla": [mla_latent_layout(40, small)] * 2,
        "dsa": [mla_latent_layout(24, small, (2, 11, other))],
        "expanded": [mla_expanded_layout(2, 5, 6, small)],
        "middle": [LayerLayout("MHA", (Channel("k", "keys", 2, 15, small, rotary_start=3),))],
        "phaseless": [attention_layout(1, 4, 8, 8, rope(0, pairing, num_axes))],
    }


def span(layout: list[LayerLayout], tokens: int, dtype: torch.dtype, seed: int = 0) -> KV:
    generator = torch.Generator().manual_seed(seed)
    layers = [
        {c.name: torch.randn(c.heads, tokens, c.dim, generator=generator).to(dtype) for c in spec.channels}
        for spec in layout
    ]
    return kv_of(layers, layer_groups(layout))


def factors(layout: list[LayerLayout], tokens: int, rank: int, dtype: torch.dtype, seed: int = 9) -> Patch:
    """A patch of all channels but the first, whose ranks differ by layer."""
    generator = torch.Generator().manual_seed(seed)
    layers: list[dict[str, LowRank]] = []
    for i, spec in enumerate(layout):
        layers.append({})
        for c in spec.channels[0 if i else 1 :]:
            left = torch.randn(tokens, rank + i, generator=generator)
            right = torch.randn(c.features, rank + i, generator=generator) / (rank + i or 1) ** 0.5
            layers[-1][c.name] = LowRank(left.to(dtype), right.to(dtype))
    return Patch.of(layers, layer_groups(layout))


@st.composite
def cases(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...], tokens: tuple[int, ...]) -> Case:
    num_axes = draw(st.sampled_from([1, 3]))
    named = layouts(draw(st.sampled_from(PAIRINGS)), num_axes)
    layout = named[draw(st.sampled_from(sorted(named)))]
    dtype, length = draw(st.sampled_from(dtypes)), draw(st.sampled_from(tokens))
    source: KV = span(layout, length, dtype, seed=draw(st.integers(0, 99)))
    codec = draw(st.sampled_from([None, None, "int8", "int4"]))
    patch = None
    if draw(st.booleans()):
        held = draw(st.sampled_from([dtype, torch.float32]))
        patch = factors(layout, length, draw(st.sampled_from([0, 1, 5, 16, 33])), held)
        bits = draw(st.sampled_from([None, None, 8, 4]))
        patch = patch if bits is None or not length else coded(patch, bits)
    moved = st.tuples(*[st.integers(-3000, 3000)] * num_axes)
    return Case(
        layout,
        source if codec is None else code_kv(source, codec),
        patch,
        draw(st.one_of(st.just((0,) * num_axes), moved)),
        draw(st.booleans()),
        dtype,
        length,
    )


def reference(case: Case) -> tuple[LayerKV, ...]:
    """R(δ)(source + patch) in float64, pairs turned as complex numbers."""
    out = []
    for i, spec in enumerate(case.layout):
        served = {}
        for c in spec.channels:
            x = _wide(case.source, i, c.name)
            if case.patch is not None and c.name in case.patch.layers[i]:
                low = case.patch.layers[i][c.name]
                delta = floats(low.left).double() @ floats(low.right).double().T
                x = x + delta.reshape(case.tokens, c.heads, c.dim).transpose(0, 1)
            if c.rope is not None:
                n, pair = len(c.rope.inv_freq), torch.arange(len(c.rope.inv_freq))
                a, b = (pair, pair + n) if c.rope.pairing == "half" else (2 * pair, 2 * pair + 1)
                a, b = a + c.rotary_start, b + c.rotary_start
                steps = [case.offset[axis] * f for axis, f in zip(c.rope.axes, c.rope.inv_freq, strict=True)]
                angle = torch.tensor(steps, dtype=torch.float64)
                z = torch.complex(x[..., a], x[..., b]) * torch.complex(angle.cos(), angle.sin())
                x = x.clone()
                x[..., a], x[..., b] = z.real, z.imag
            served[c.name] = x
        out.append(served)
    return tuple(out)


def _wide(source: KV, layer: int, name: str) -> torch.Tensor:
    if isinstance(source, CodedKV):
        coded = source.codes[layer][name]
        return replace(coded, steps=coded.steps.double(), lows=coded.lows.double()).dense()
    return source[layer][name].double()


def target(case: Case, dtype: torch.dtype, across: bool = False, device: str = "cpu") -> tuple[KV, KV]:
    """A live buffer full of sevens, and the views of it that are to be written.

    ``across`` lays the heads of one token side by side in memory, instead of the tokens of one head.
    """
    before, after = 3, 2
    rows, groups = before + case.tokens + after, layer_groups(case.layout)
    parts = []
    for layers in groups:
        parts.append({})
        for i, c in case.written():
            if i == layers[0] and across:
                whole = torch.full((len(layers), rows, c.heads, c.dim), 7.0, dtype=dtype, device=device)
                parts[-1][c.name] = whole.transpose(1, 2)
            elif i == layers[0]:
                parts[-1][c.name] = torch.full(
                    (len(layers), c.heads, rows, c.dim), 7.0, dtype=dtype, device=device
                )
    buffer = Blocks(parts, groups)
    return buffer, kv_slice(buffer, before, before + case.tokens)


def check(case: Case, buffer: KV, views: KV, *, ulps: float = 0.5) -> None:
    """Every value is ``ulps`` roundings of its dtype from the reference; nothing else was written."""
    want = reference(case)
    for i, c in case.written():
        got, right = views[i][c.name].double(), want[i][c.name]
        dtype = views[i][c.name].dtype
        # what float32 sums lose against float64, by the size of what is summed; none for float64
        work = torch.float64 if torch.float64 in (case.dtype, dtype) else torch.float32
        if case.patch is not None and work == torch.float64:
            work = torch.float32 if dtype != torch.float64 else torch.float64
        scale = float(right.abs().max()) if right.numel() else 0.0
        slack = 64 * torch.finfo(work).eps * scale
        bound = ulps * torch.finfo(dtype).eps * right.abs() + slack + torch.finfo(dtype).tiny
        worst = (got - right).abs() - bound
        assert not worst.numel() or float(worst.max()) <= 0, (i, c.name, float(worst.max()))
        whole = buffer[i][c.name]
        assert bool((whole[:, :3] == 7).all()) and bool((whole[:, 3 + case.tokens :] == 7).all())
