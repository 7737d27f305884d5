"""Records to store, drawn or fixed, and files that are wrong in one way but carry a good digest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from benchmarks.reliability.forge import join, seal, split
from kamera.ops import KV, Blocks, Codes, LowRank, LowRanks, Patch, equal_groups, kv_of
from kamera.store import (
    CanonicalRecord,
    Context,
    EncodingRecord,
    PatchRecord,
    encoding_context,
)
from kamera.store.format import Codec
from kamera.store.memory import Pins

__all__ = ["decode", "encode", "join", "seal", "split"]

encode, decode = Codec().encode, Codec().decode

CONTEXT = Context("f" * 64, "a" * 64)
CHUNK = "c" * 64
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int8)


def tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random bits, so NaNs and denormals included."""
    generator = torch.Generator().manual_seed(seed)
    numel = torch.Size(shape).numel()
    raw = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def canonical(
    chunk: str = "c" * 64, context: Context = CONTEXT, tokens: int = 3, seed: int = 0, **fields: Any
) -> CanonicalRecord:
    """``kv`` is a KV, or its layers in order: channel -> ``[heads, tokens, dim]``."""
    kv = (
        {
            "k": tensor((2, tokens, 4), torch.bfloat16, seed),
            "v": tensor((2, tokens, 4), torch.bfloat16, seed + 1),
        },
        {},
    )
    defaults: dict[str, Any] = {
        "input_ids": torch.arange(tokens),
        "positions": torch.arange(tokens).expand(3, tokens),
        "kv": kv,
        "inputs": {"image_grid_thw": torch.tensor([[1, 2, 2]])},
        "info": {"title": "Käfer", "size": [640, 480]},
    }
    given = defaults | fields
    kept = given["kv"] if isinstance(given["kv"], Blocks) else kv_of(given["kv"])
    return CanonicalRecord(chunk_id=chunk, context=context, **(given | {"kv": kept}))


VISION = "e" * 64


def encoding(
    chunk: str = "c" * 64, vision: str = VISION, tenant: str = "", tokens: int = 3, seed: int = 0
) -> EncodingRecord:
    embeds = {"inputs_embeds": tensor((1, tokens, 6), torch.bfloat16, seed + 2)}
    return EncodingRecord(chunk, encoding_context(vision, tenant), tokens, embeds)


def anchor(context: Context = CONTEXT, tokens: int = 5, seed: int = 0) -> CanonicalRecord:
    made = canonical(context.anchor, replace(context, kv="as-is"), tokens, seed, inputs={}, info={})
    return replace(made, kind="anchor")


def patch(
    chunk: str = "c" * 64,
    context: Context = CONTEXT,
    antecedents: tuple[str, ...] = ("x", "y"),
    kind: str = "exact",
    rank: int = 2,
    formed: str = "exact",
    seed: int = 0,
) -> PatchRecord:
    factors = LowRank(tensor((3, rank), torch.float16, seed), tensor((8, rank), torch.float16, seed))
    return PatchRecord(chunk, context, antecedents, kind, Patch.of(({}, {"v": factors})), formed)


def codes(rows: int, columns: int, bits: int, seed: int = 0) -> Codes:
    """Random bits in codes and scales."""
    held = columns if bits == 8 else -(-columns // 2)
    dtype = torch.int8 if bits == 8 else torch.uint8
    return Codes(tensor((rows, held), dtype, seed), tensor((columns,), torch.float32, seed))


def coded_patch(bits: int = 8, rank: int = 3, chunk: str = "c" * 64) -> PatchRecord:
    """One channel in codes on both sides, one with only the left factor in codes, one in floats."""
    both = LowRanks.of([LowRank(codes(3, rank, bits, 1), codes(8, rank, bits, 2))])
    floats = LowRanks.of([LowRank(tensor((3, 2), torch.float16, 4), tensor((5, 2), torch.float16, 5))])
    assert both is not None and floats is not None
    one = LowRanks(both.left, tensor((8, both.left.shape[1]), torch.bfloat16, 3), both.ranks)
    factors = Blocks([{}, {"k": both, "v": one, "x": floats}], ((0,), (1,)))
    return PatchRecord(chunk, CONTEXT, ("x", "y"), "exact", Patch(factors), "exact")


def assert_same(left: Any, right: Any) -> None:
    """Equal to the bit, dtype, shape and every field besides."""
    assert type(left) is type(right)
    assert left.header() == right.header()
    mine, theirs = left.tensors(), right.tensors()
    assert mine.keys() == theirs.keys()
    for name, one in mine.items():
        other = theirs[name]
        assert (one.dtype, one.shape) == (other.dtype, other.shape), name
        assert bits(one) == bits(other), name


def bits(t: torch.Tensor) -> list[int]:
    return t.contiguous().reshape(-1).view(torch.uint8).tolist()


def file_of(root: Path, key: str) -> Path:
    """The file of an object in a plain directory."""
    return root / "objects" / f"{key}.safetensors"


def flip(path: Path, position: int = -1) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def snapshot(root: Path) -> dict[str, bytes]:
    """Every file below ``root``."""
    return {str(p): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def is_pinned(book: Pins, name: str) -> bool:
    """Whether an object is pinned now."""
    return any(pin.name == name for pin in book.list())


def drop_index(root: Path) -> None:
    """Lose the index of a directory."""
    for path in root.glob("index.sqlite*"):
        path.unlink()


_text = st.text(st.characters(codec="utf-8"), max_size=6)
_names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=6)
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_text, inner, max_size=3),
    max_leaves=6,
)
_infos = st.dictionaries(_text, _json, max_size=3)
contexts = st.builds(Context, _text, _text, st.just(""))


@st.composite
def tensors(draw: st.DrawFn, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    if shape is None:
        shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    return tensor(shape, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 2**16)))


groupings = st.lists(st.integers(0, 2), max_size=4).map(equal_groups)
"""Groups of the layers of a model: those of equal numbers are one."""


@st.composite
def kvs(draw: st.DrawFn, tokens: int) -> KV:
    groups, parts = draw(groupings), []
    for layers in groups:
        shape = st.tuples(st.just(len(layers)), st.integers(1, 3), st.just(tokens), st.integers(1, 5))
        parts.append(draw(st.dictionaries(_names, shape.flatmap(tensors), max_size=3)))
    return Blocks(parts, groups)


@st.composite
def canonicals(draw: st.DrawFn) -> CanonicalRecord:
    tokens = draw(st.integers(0, 4))
    named = st.dictionaries(_names, tensors(), max_size=2)
    return CanonicalRecord(
        chunk_id=draw(_text),
        context=draw(contexts),
        input_ids=torch.arange(tokens) * 1_000_000_007,
        positions=torch.arange(tokens).expand(draw(st.integers(1, 3)), tokens),
        kv=draw(kvs(tokens)),
        inputs=draw(named),
        info=draw(_infos),
        vision=draw(_text),
        behind=draw(st.integers(0, 9)),
    )


@st.composite
def encodings(draw: st.DrawFn) -> EncodingRecord:
    single = _names.filter(lambda name: "." not in name)  # x.1 would be the entry of a list
    named = st.dictionaries(single, tensors(), max_size=2)
    context = encoding_context(draw(_text), "")
    return EncodingRecord(draw(_text), context, draw(st.integers(0, 4)), draw(named), draw(_infos))


@st.composite
def patches(draw: st.DrawFn) -> PatchRecord:
    tokens, groups = draw(st.integers(1, 4)), draw(groupings)

    @st.composite
    def factors(draw: st.DrawFn, layers: int) -> LowRanks:
        ranks, features = tuple(draw(st.integers(0, 3)) for _ in range(layers)), draw(st.integers(1, 6))
        bits = [draw(st.sampled_from((None, 4, 8))) for _ in "lr"]  # None: floats
        columns = sum(rank + rank % 2 if 4 in bits else rank for rank in ranks)

        def side(rows: int, bits: int | None) -> torch.Tensor | Codes:
            if bits is not None:
                return codes(rows, columns, bits, draw(st.integers(0, 2**16)))
            return draw(tensors((rows, columns)))

        return LowRanks(side(tokens, bits[0]), side(features, bits[1]), ranks)

    parts = [draw(st.dictionaries(_names, factors(len(layers)), max_size=2)) for layers in groups]
    return PatchRecord(
        chunk_id=draw(_text),
        context=draw(contexts),
        antecedents=tuple(draw(st.lists(_text, max_size=3))),
        kind=draw(st.sampled_from(("exact", "orbit"))),
        patch=Patch(Blocks(parts, groups)),
        formed=draw(_text),
        info=draw(_infos),
        base=draw(_text),
    )


@st.composite
def anchors(draw: st.DrawFn) -> CanonicalRecord:
    made, context = draw(canonicals()), draw(contexts)
    return replace(made, chunk_id=context.anchor, context=context, kind="anchor")


records = canonicals() | patches() | encodings() | anchors()
