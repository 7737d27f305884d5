"""Stored chunks in a prompt: found by token ids and media, from rows alone, within one context."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kamera import ChunkStore
from kamera.engines import Placeholder, Recognised, match
from kamera.ops import ids_digest
from kamera.store import Context, ObjectInfo, Outline
from kamera.window import former_of, keep_kv, sequence_of
from tests.window.rig import SYSTEM, make, rig

OWN = Context("f" * 64, "a" * 64, "acme")
PAD = 9  # the placeholder token


def row(name: str, ids, *, media=(), vision="", context=OWN) -> ObjectInfo:
    places = torch.arange(len(ids))[None]
    outline = Outline.of(torch.tensor(ids), places, (len(ids),), media)
    whole = ObjectInfo(name, "canonical", name, context, (), len(ids), None, None, 1, 0.0)
    return replace(whole, base=vision, outline=outline)


def slow(ids, media, rows, start):
    """Every stored chunk, the longest first, compared token by token."""
    found, at = [], start
    while at < len(ids):
        for one in sorted(rows, key=lambda r: -r[0].tokens):
            info, tokens = one
            stop = at + len(tokens)
            if list(ids[at:stop]) != list(tokens) or stop > len(ids):
                continue
            touching = [m for m in media if m.start < stop and m.start + m.length > at]
            if any(m.start < at or m.start + m.length > stop for m in touching):
                continue
            names = tuple(m.id for m in touching)
            own = bool(info.base or info.outline.media)
            if own and (names == info.outline.media != () or (names and set(names) == {info.chunk_id})):
                break
            if not own and not names:
                break
        else:
            return found
        found.append((one[0].chunk_id, at, stop))
        at = stop
    return found


chunks = st.lists(
    st.tuples(
        st.lists(st.integers(1, 3), min_size=1, max_size=12),
        st.sampled_from([(), (), (0, 2), (1, 1)]),  # where a picture stands in it, and its length
        st.booleans(),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=150, deadline=None)
@given(made=chunks, data=st.data())
def test_it_finds_what_a_slow_comparison_of_all_tokens_finds(made, data):
    rows, pictures = {}, {}
    for i, (ids, picture, aliased) in enumerate(made):
        media = ()
        if picture and len(ids) >= sum(picture):
            ids = [*ids[: picture[0]], *[PAD] * picture[1], *ids[picture[0] + picture[1] :]]
            media = (f"m{i}",) if aliased else ()
        else:
            picture = ()
        if tuple(ids) in {tuple(t) for t, _ in pictures.values()} and not picture:
            continue  # texts of equal ids are one chunk
        rows[f"c{i}"] = row(f"c{i}", ids, media=media, vision="v" if picture else "")
        pictures[f"c{i}"] = (ids, picture)
    known = Recognised(OWN, rows.values())
    ids, media = list(data.draw(st.lists(st.integers(1, 3), max_size=3))), []
    start = len(ids)
    for name in data.draw(st.lists(st.sampled_from(sorted(rows)), max_size=6)):
        tokens, picture = pictures[name]
        if picture:
            own = [name, *rows[name].outline.media, "m0", "stranger"]
            media.append(Placeholder(len(ids) + picture[0], picture[1], data.draw(st.sampled_from(own))))
        ids += tokens
    ids += data.draw(st.lists(st.integers(1, 3), max_size=3))
    found = [(m.row.chunk_id, m.start, m.stop) for m in match(ids, media, known, start)]
    wanted = slow(ids, media, [(info, pictures[name][0]) for name, info in rows.items()], start)
    assert [(a, b) for _, a, b in found] == [(a, b) for _, a, b in wanted]
    for (name, *_), (same, *_) in zip(found, wanted, strict=True):
        assert rows[name].outline.ids == rows[same].outline.ids


@pytest.mark.parametrize("other", ["tenant", "fingerprint", "anchor", "kv"])
def test_an_alias_leads_to_no_chunk_of_another_context(other):
    """The same tokens and the same media id, of another tenant, model, anchor or form: unknown."""
    foreign = replace(OWN, **{other: "int8" if other == "kv" else "other"})
    known = Recognised(OWN)
    assert not known.add(row("c", [1, PAD, 2], media=("hash",), vision="v", context=foreign))
    assert match([1, PAD, 2], [Placeholder(1, 1, "hash")], known, 0) == ()


def test_a_windows_prompt_is_recognised_from_the_rows_of_its_store(tmp_path):
    """No tensor is read: the objects are gone, their rows are enough."""
    backbone, made = rig("qwen2_5_vl", 4)
    with ChunkStore.open(tmp_path / "store") as store:
        window = make(backbone, store, *made)
        keep_kv(window)
        rows = store.ls("canonical", context=former_of(window).context)
        ids = sequence_of(window).input_ids.numpy()
        wanted = [(s.chunk_id, s.start, s.start + s.length) for s in window]
    media, pads = [], np.flatnonzero(np.isin(ids, backbone.builder.vision_tokens))
    for run in np.split(pads, np.flatnonzero(np.diff(pads) > 1) + 1):
        owner = next(chunk for chunk, start, stop in wanted if start <= run[0] < stop)
        media.append(Placeholder(int(run[0]), len(run), owner))
    known = Recognised(former_of(window).context, rows)
    assert [(m.row.chunk_id, m.start, m.stop) for m in match(ids, media, known, len(SYSTEM))] == wanted
    for slot, info in zip(window, (m.row for m in match(ids, media, known, len(SYSTEM))), strict=True):
        own = sequence_of(window).position_ids[:, slot.start : slot.start + slot.length]
        extent = tuple((own.amax(1) - own.amin(1)).tolist())
        assert tuple(b - a for a, b in zip(info.outline.low, info.outline.high, strict=True)) == extent
        assert info.outline.ids == ids_digest(ids[slot.start : slot.start + slot.length])
    starts = [int(sequence_of(window).position_ids[0, slot.start]) for slot in window]
    advances = [m.row.outline.advance[0] for m in match(ids, media, known, len(SYSTEM))]
    assert [b - a for a, b in pairwise(starts)] == advances[:-1]
