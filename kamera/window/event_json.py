"""Events as lines of JSON: each chunk id and each slot of a line is written once, and named by its index."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from kamera.engines import Spent, Usage
from kamera.errors import quote
from kamera.ops import Proof
from kamera.window.events import Event, Outcome
from kamera.window.memory import WindowMemory
from kamera.window.report import Report, SlotReport, Times
from kamera.window.slots import Slot
from kamera.window.steps import Cost

FORMAT = 1
_OWN = ("time", "operation", "session", "window", "anchor", "anchor_tokens", "max_tokens", "cached")
_COSTS = (
    *("forwards", "tokens_recomputed", "tokens_held", "vision_encodes"),
    *("bytes_rotated", "bytes_patched", "seconds"),
)
_DEFAULTS = {f.name: f.default for f in fields(Slot)}


def event_to_json(event: Event) -> str:
    """An event as one line."""
    report, ids, slots = event.report, dict[str, int](), dict[Slot, int]()

    def named(chunk_id: str) -> int:
        return ids.setdefault(chunk_id, len(ids))

    def listed(several: Sequence[Slot]) -> list[int]:
        return [slots.setdefault(slot, len(slots)) for slot in several]

    document: dict[str, Any] = {"format": FORMAT, **{name: getattr(event, name) for name in _OWN}}
    document |= {"after": listed(report.slots), "before": listed(event.before)}
    document["evicted"] = listed(report.evicted)
    document["slot"] = None if report.slot is None else listed([report.slot])[0]
    document["slots"] = [_row(slot, named(slot.chunk_id), [*map(named, slot.antecedents)]) for slot in slots]
    document["ids"] = [*ids]
    document["outcomes"] = [list(outcome) for outcome in event.outcomes]
    document["report"] = {name: getattr(report, name) for name in _COSTS}
    document["times"] = list(report.times)
    document["notes"] = report.notes
    document["later"] = list(asdict(event.later).values())
    document["usage"] = [list(spent) for spent in event.usage]
    document["memory"] = asdict(event.memory)
    if event.pictures:
        document["pictures"] = {k: base64.b64encode(v).decode() for k, v in event.pictures.items()}
    if event.texts:
        document["texts"] = dict(event.texts)
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False)


def event_from_json(text: str | bytes) -> Event:
    """An event out of `event_to_json`. Raises ValueError for anything else."""
    try:
        document = json.loads(text)
        if document["format"] != FORMAT:
            raise ValueError("it has another format")
        return _event(document)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise ValueError(f"{quote(text)} is no event ({type(error).__name__}: {error})") from None


def _row(slot: Slot, chunk: int, behind: Sequence[int]) -> dict[str, Any]:
    """A slot; fields at their defaults are left out."""
    row = {name: getattr(slot, name) for name in _DEFAULTS if getattr(slot, name) != _DEFAULTS[name]}
    row |= {"chunk_id": chunk, "antecedents": behind}
    if slot.proof is not None:
        row["proof"] = asdict(slot.proof)
    return row


def _slot(row: Mapping[str, Any], ids: Sequence[str]) -> Slot:
    proof = row.get("proof")
    made = {
        "chunk_id": ids[row["chunk_id"]],
        "antecedents": tuple(ids[i] for i in row["antecedents"]),
        "proof": None if proof is None else Proof(**{**proof, "asked": tuple(proof["asked"])}),
    }
    slot = Slot(**{**row, **made})
    if not all(type(n) is int and n >= 0 for n in (slot.start, slot.length, slot.number)):
        raise ValueError("a slot's numbers are no whole numbers")
    return slot


def _event(document: Mapping[str, Any]) -> Event:
    ids = document["ids"]
    if not all(isinstance(name, str) for name in (*ids, document["anchor"], document["operation"])):
        raise ValueError("an id is no text")
    slots = [_slot(row, ids) for row in document["slots"]]
    after, before, evicted = (
        tuple(slots[i] for i in document[name]) for name in ("after", "before", "evicted")
    )
    costs = {name: document["report"][name] for name in _COSTS}
    rest: dict[str, Any] = {"times": Times(*document["times"]), "notes": tuple(document["notes"]), **costs}
    head: dict[str, Any] = {"operation": document["operation"], "slots": after, "evicted": evicted}
    at = document["slot"]
    report = Report(slot=None, **head, **rest) if at is None else SlotReport(slot=slots[at], **head, **rest)
    now, later = (Spent(*spent) for spent in document["usage"])
    return Event(
        plan=None,
        report=report,
        before=before,
        outcomes=tuple(Outcome(*outcome) for outcome in document["outcomes"]),
        later=Cost(*document["later"]),
        usage=Usage(now, later),
        memory=WindowMemory(**document["memory"]),
        pictures={k: base64.b64decode(v) for k, v in document.get("pictures", {}).items()},
        texts=document.get("texts", {}),
        **{name: document[name] for name in _OWN},
    )
