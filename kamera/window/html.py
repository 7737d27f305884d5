"""Windows and reports as HTML tables for notebooks. Text of chunks is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from kamera.window.slots import Slot

_SLOT = ("", "chunk", "label", "start", "tokens", "guarantee", "rank", "behind", "bytes")


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """An HTML table under a title."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    caption = f"<caption>{escape(title)}</caption>"
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def slot_table(title: str, slots: Sequence[Slot]) -> str:
    """A row for each slot."""
    rows = (
        (
            i,
            slot.chunk_id[:12],
            slot.label,
            slot.start,
            slot.length,
            slot.guarantee if slot.conditioned else f"{slot.guarantee}, shown clean",
            "" if slot.rank is None else slot.rank,
            " ".join(chunk[:8] for chunk in slot.antecedents),
            slot.bytes,
        )
        for i, slot in enumerate(slots)
    )
    return table(title, _SLOT, rows)
