"""The requests of a trace as prompts: conversations out of JSON lines, or what a window held."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kamera.analyze.example import example
from kamera.content import Conversations
from kamera.engines.hf import Backbone, HfEngine
from kamera.errors import ProcessorRequired, TraceError, quote
from kamera.files import user_path
from kamera.ops import digest
from kamera.reuse import Media, Prompt
from kamera.window import Event

Requests = Sequence[tuple[str, Prompt]]
"""The prompts of a trace in their order, each with the service that asked ("": not said)."""

_WAYS = 'give {"messages": […]} (and "tools", "service"), or the file of KameraWindow(trace=…)'


def read_requests(backbone: Backbone | HfEngine, path: str | Path | None = None) -> Requests:
    """The prompts of a trace, as the model's chat template writes them (None: those of `example`).

    A line is a request, ``{"messages": […], "tools": […], "service": "…"}`` as for an API of chats, the last
    two if there are any; or an operation of a window (`kamera.window.Trace`): what was in view after it, with
    ids that stand for a chunk's tokens, since it holds none. Raises TraceError naming a line that is neither,
    ProcessorRequired without a chat template, OSError if the file cannot be read.
    """
    engine = backbone.engine
    if path is None:
        return [(row["service"], _rendered(engine, row)) for row in example()]
    found: list[tuple[str, Prompt]] = []
    for number, line in enumerate(user_path(path).read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            found.append(_request(engine, line))
        except ProcessorRequired:
            raise
        except (ValueError, KeyError, TypeError) as error:
            raise TraceError(
                f"{path}:{number}: {quote(line.decode(errors='replace'))} is no request ({error}): {_WAYS}"
            ) from None
    if not found:
        raise TraceError(f"{path}: no request in it: {_WAYS}")
    return found


def ids_of(backbone: Backbone | HfEngine, requests: Requests, least: int) -> torch.Tensor:
    """All different texts of the requests one after another, token ids ``[tokens]``, no segment twice.

    Raises ValueError for fewer than ``least`` tokens, and for the trace of a window, which has no texts.
    """
    engine, seen, parts = backbone.engine, set[bytes](), list[np.ndarray[Any, Any]]()
    for _, prompt in requests:
        if prompt.ids.size and prompt.ids.max() >= engine.builder.token_count:
            raise ValueError(f"a window's trace holds no texts, and this runs the model: {_WAYS}")
        placed = np.isin(prompt.ids, engine.builder.vision_tokens)
        edges = (0, *prompt.anchors, len(prompt))
        for start, stop in pairwise(edges):
            raw = prompt.slice(start, stop)
            if raw not in seen and not placed[start:stop].any():
                seen.add(raw)
                parts.append(prompt.ids[start:stop].astype(np.int64))
    whole = np.concatenate([*parts, np.zeros(0, np.int64)])
    if len(whole) < least:
        raise ValueError(f"the trace has {len(whole)} tokens of text, {least} are needed: give a longer one")
    return torch.from_numpy(whole)


def _request(engine: HfEngine, line: bytes) -> tuple[str, Prompt]:
    row = json.loads(line)
    if isinstance(row, dict) and "operation" in row:
        event = Event.from_json(line)
        return event.session or event.window, _in_view(event)
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise ValueError("it has no messages")
    return str(row.get("service", "")), _rendered(engine, row)


def _rendered(engine: HfEngine, row: Mapping[str, Any]) -> Prompt:
    if engine.processor is None:
        raise ProcessorRequired("requests need the model's chat template: load it with its processor")
    conversations = Conversations(engine.processor, most=None, limits=engine.builder.limits)
    whole = conversations.render(row["messages"], tools=row.get("tools"))
    media = [Media(s.start, s.stop, s.media) for s in whole.segments if s.media is not None]
    return Prompt.of(whole.ids.numpy(), anchors=[s.start for s in whole.segments], media=media)


def _in_view(event: Event) -> Prompt:
    """The window after an operation. Equal chunks have equal ids, above those of any vocabulary."""
    parts = [(event.anchor, event.anchor_tokens), *[(s.chunk_id, s.length) for s in event.report.slots]]
    ids = [_stand_in(name, count) for name, count in parts]
    return Prompt.of(np.concatenate(ids), anchors=np.cumsum([len(part) for part in ids]).tolist())


def _stand_in(name: str, count: int) -> np.ndarray[Any, Any]:
    seed = int(digest(name)[:16], 16)
    return np.random.default_rng(seed).integers(2**31, 2**32, count, dtype=np.uint32)
