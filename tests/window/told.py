"""Events made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kamera.engines import Spent, Usage
from kamera.window import Event, Outcome, Report, Slot, SlotReport, WindowMemory

ANCHOR = "a0"
MEMORY = WindowMemory(live=4_000, copies=3_000, encodings=2_000, shared=1_000)


def slot(chunk_id: str, number: int, start: int = 0, length: int = 10, **given: Any) -> Slot:
    fields = {
        "guarantee": "exact",
        "antecedents": (),
        "rank": None,
        "bytes": 100 * length,
        "position": start,
        "conditioned": True,
        "label": f"frame {chunk_id}",
    }
    return Slot(chunk_id=chunk_id, number=number, start=start, length=length, **{**fields, **given})


def event(
    operation: str,
    before: Sequence[Slot],
    after: Sequence[Slot],
    *,
    outcomes: Sequence[Outcome] = (),
    concerns: Slot | None = None,
    costs: dict[str, Any] | None = None,
    **given: Any,
) -> Event:
    """An operation's event; by default it ran nothing."""
    here = {s.number for s in after}
    counts: dict[str, Any] = {
        "forwards": 0,
        "tokens_recomputed": sum(o.tokens for o in outcomes),
        "vision_encodes": 0,
        "bytes_rotated": 0,
        "bytes_patched": 0,
        "seconds": 0.25,
        **(costs or {}),
    }
    slots = (tuple(after), tuple(s for s in before if s.number not in here))
    kind = Report if concerns is None else SlotReport
    report = kind(operation, concerns, *slots, **counts)
    fields = {
        "time": 1_000.0,
        "anchor": ANCHOR,
        "plan": None,
        "window": "w1",
        "anchor_tokens": 5,
        "max_tokens": None,
        "usage": Usage(Spent(), Spent()),
        "memory": MEMORY,
        "cached": 7_000,
    }
    return Event(
        operation=operation,
        report=report,
        before=tuple(before),
        outcomes=tuple(outcomes),
        **{**fields, **given},
    )


def write_trace(path: Path, *events: Event) -> Path:
    """The file of a trace."""
    path.write_text("".join(each.to_json() + "\n" for each in events), encoding="utf-8")
    return path
