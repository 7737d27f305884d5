"""The segment's operation alone: a stored chunk into its slot, against prefilling the same tokens again.

Both stand behind the same context and end with the chunk's KV in its place; neither sees a picture
(the tokens' embeddings are there) and neither asks a question (`lab.speed.serve` does both). The
context is noise: what it holds changes no shape. So is the deficit the patch is cut from, of a falling
spectrum, the same in all layers but the first, which never has one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from kamera.engines.hf import HfEngine, forwards
from kamera.ops import KV, KVCodec, Patch, code_kv, kv_bytes, kv_slice
from kamera.ops.kernels import serve
from kamera.ops.layout import Layout
from kamera.trust import ReusePolicy
from lab.speed.content import noise_kv, noise_patch, words
from lab.speed.machine import copy_arm
from lab.speed.presets import preset
from lab.speed.settings import Settings, Step, unwatched
from lab.speed.table import (
    GOALS,
    Result,
    Row,
    Section,
    goal,
    model_facts,
    preset_line,
    result,
    times,
)
from lab.speed.timing import Arm, Spread, measure

CONTEXT = 512
"""Tokens in front of the chunk."""


FASTER: Mapping[Any, float] = {256: 4.0, 2048: 60.0}
"""Goals: by how much apply beats re-prefill at a length, on a GPU, at the shapes of a 7B."""


class _Way(NamedTuple):
    """One way to fill the slot: what it reads and how many bytes it must read and write for it."""

    source: KV
    patch: Patch | None
    moved: int


def run(settings: Settings, step: Step = unwatched) -> Result:
    """One row per length and way."""
    shape = preset(settings.preset)
    backbone = settings.build(shape)
    rows: list[Row] = []
    for done, length in enumerate(settings.lengths):
        step(done, len(settings.lengths))
        rows += _line(backbone, length, settings)
    step(len(settings.lengths), len(settings.lengths))
    title = f"A chunk into its slot behind {CONTEXT} tokens: apply against re-prefill"
    notes = (
        "re-prefill: the decoder over the chunk's tokens behind the context, embeddings given, no logits",
        f"patch: rank {ReusePolicy.rank} within {ReusePolicy.patch_bytes:.0%} of the KV's bytes, the default "
        "budget; of a random deficit",
        "moved: canonical and factors read once, slot written once; share: of what a plain copy that moves "
        "as many bytes reaches in the same rounds",
    )
    sections = [Section(title, tuple(rows)), Section(GOALS, tuple(_goals(rows, settings)))]
    return result("apply", settings, model_facts(shape, backbone), sections, notes)


def _line(backbone: HfEngine, length: int, settings: Settings) -> list[Row]:
    layout, device = backbone.layout, torch.device(settings.device)
    context = noise_kv(backbone, CONTEXT, seed=1)
    canonical = noise_kv(backbone, length, seed=2)
    slot = kv_slice(forwards.allocate_kv(backbone, CONTEXT + length), CONTEXT, CONTEXT + length)
    patch = noise_patch(canonical, layout)
    offset = [CONTEXT] * backbone.axes
    plain = kv_bytes(canonical)
    ways: dict[str, _Way] = {
        "patched": _Way(canonical, patch, 2 * plain + patch.nbytes),
        "blind": _Way(canonical, None, 2 * plain),
    }
    codecs: tuple[KVCodec, ...] = ("int8", "int4")
    for codec in codecs:
        coded = code_kv(canonical, codec).to([device] * len(canonical.groups))
        ways[f"patched, {codec}"] = _Way(coded, patch, coded.nbytes + plain + patch.nbytes)
    paths = {
        name: serve(slot, way.source, way.patch, layout, offset)  # compiles what has to be, too
        for name, way in ways.items()
    }
    chunk = backbone.encode(backbone.chunk_from_tensors(words(backbone, length)))
    places = torch.arange(CONTEXT, CONTEXT + length).expand(backbone.axes, -1)
    arms = [
        Arm(
            "re-prefill",
            lambda cache: forwards.run(backbone, chunk, places, cache),
            lambda: forwards.make_cache(backbone, [context]),
        ),
        *(Arm(name, _apply(slot, way, layout, offset)) for name, way in ways.items()),
        *(copy_arm(f"copy, {name}", way.moved, device) for name, way in ways.items()),
    ]
    timed = measure(
        arms, device, rounds=settings.rounds, min_rounds=settings.min_rounds, seconds=settings.seconds
    )
    first: Row = {"tokens": length, "way": "re-prefill", **times(timed, "re-prefill")}
    return [
        first,
        *(
            {
                "tokens": length,
                "way": name,
                **times(timed, name),
                "times faster": timed.ratio("re-prefill", name),
                "moved MB": way.moved / 1e6,
                "GB/s": way.moved / 1e9 / timed.spread(name).median,
                "share of copy": timed.ratio(f"copy, {name}", name),
                "path": paths[name],
            }
            for name, way in ways.items()
        ),
    ]


def _goals(rows: Sequence[Row], settings: Settings) -> Iterator[Row]:
    """Of a GPU what was asked at the shapes of a 7B with all layers; of any CPU what was asked of one."""
    on_gpu = torch.device(settings.device).type == "cuda"
    for row in rows:
        faster, tokens = row.get("times faster"), row["tokens"]
        asked = on_gpu and settings.layers is None and row["way"] == "patched" and tokens in FASTER
        if asked and isinstance(faster, Spread):
            yield goal(f"apply {tokens} tokens, times faster", faster, least=FASTER[tokens])
    for way in ("patched", "blind"):
        shares = {
            row["tokens"]: share
            for row in rows
            if row["way"] == way and isinstance(share := row.get("share of copy"), Spread)
        }
        tokens = min(shares, key=lambda n: shares[n].median)
        share = shares[tokens]
        if on_gpu:
            yield goal(f"apply, {way}: share of copy bandwidth (least: {tokens} tokens)", share, least=0.8)
        else:
            slower = Spread(1 / share.median, 1 / share.high, 1 / share.low)
            yield goal(f"apply, {way}: times a plain copy (most: {tokens} tokens)", slower, most=2.0)


def page(documents: Sequence[Mapping[str, Any]]) -> Iterator[Section]:
    """For docs/results/speed.md: one line per preset and length, its ways side by side."""
    for on_gpu in (True, False):
        lines: list[Row] = []
        for document in documents:
            if document["settings"]["device"].startswith("cuda") != on_gpu:
                continue
            rows = document["sections"][0]["rows"]
            for tokens in dict.fromkeys(row["tokens"] for row in rows):
                by = {row["way"]: row for row in rows if row["tokens"] == tokens}
                patched = by["patched"]
                lines.append(
                    {
                        "preset": preset_line(document),
                        "tokens": tokens,
                        "re-prefill ms": by["re-prefill"]["ms"],
                        "apply ms": patched["ms"],
                        "times faster": patched["times faster"],
                        "share of copy": patched["share of copy"],
                        "blind, times faster": by["blind"]["times faster"],
                        "blind, share of copy": by["blind"]["share of copy"],
                        "int8, times faster": by["patched, int8"]["times faster"],
                        "int4, times faster": by["patched, int4"]["times faster"],
                        "path": patched["path"],
                    }
                )
        if lines:
            yield Section("On the GPU" if on_gpu else "On the CPU", tuple(lines))


def _apply(slot: KV, way: _Way, layout: Layout, offset: list[int]) -> Callable[[], object]:
    return lambda: serve(slot, way.source, way.patch, layout, offset)
