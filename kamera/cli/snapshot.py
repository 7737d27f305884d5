"""Saved windows, alone or of sessions, as the one event that each tells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kamera.cli.contents import read_window
from kamera.engines import Spent, Usage
from kamera.errors import StoreError
from kamera.sessions.save import read_document
from kamera.store import chunks_of
from kamera.window import WINDOW, Event, Outcome, Report, Slot, WindowMemory


def events_in(directory: Path) -> list[Event]:
    """The event of a saved window: "saved", without work; of a saved session that of its window; of a pool's
    directory those of all its sessions.

    Nothing of how they came to be is saved. Raises StoreError for a directory that holds none of these,
    CorruptChunk and StoreVersionError as `read_window` and `read_document`.
    """
    if (directory / WINDOW.name).is_file():
        return [_event_of(read_window(directory), directory, session="")]
    inside = f"window-*/{WINDOW.name}"
    files = sorted(directory.glob(inside)) or sorted(directory.glob(f"*/{inside}"))
    if not files:
        raise StoreError(f"{str(directory)!r} has no saved window or session: give one, or a trace")
    return [_event_of(read_window(file.parent), file.parent, _name_of(file.parent.parent)) for file in files]


def _name_of(session: Path) -> str:
    """A saved session's name: its id in its pool, with its tenant's; else its directory's."""
    document = read_document(session)
    name = document.id or session.name
    return f"{document.tenant}: {name}" if document.tenant else name


def _event_of(window: dict[str, Any], directory: Path, session: str) -> Event:
    start, slots = window["anchor_tokens"], list[Slot]()
    for number, chunk in enumerate(window["chunks"]):
        copies = chunk["copies"]
        clean = copies.get("clean")
        copy = clean or copies["copy"]
        slots.append(
            Slot(
                chunk_id=chunk["chunk_id"],
                start=start,
                length=chunk["tokens"],
                guarantee="blind" if clean and number else chunk["guarantee"],
                antecedents=chunks_of(copy["antecedents"]),
                rank=copy["rank"],
                bytes=copy["kv_bytes"],
                number=number,
                position=start,
                conditioned=clean is None,
                label=chunk["label"],
            )
        )
        start += chunk["tokens"]
    return Event(
        operation="saved",
        time=(directory / WINDOW.name).stat().st_mtime,
        anchor=window["fingerprint"],
        plan=None,
        report=Report("saved", None, tuple(slots), (), 0, 0, 0, 0, 0, 0.0),
        before=tuple(slots),
        window=directory.name,
        session=session,
        anchor_tokens=window["anchor_tokens"],
        max_tokens=window["max_tokens"],
        usage=Usage(Spent(), Spent()),
        memory=WindowMemory(live=0, copies=window["bytes"], encodings=0, shared=0),
        cached=0,
        outcomes=tuple(Outcome("kept") for _ in slots),
    )
