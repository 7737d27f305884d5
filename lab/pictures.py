"""The pictures of docs/how-it-works.md: ``python -m lab.pictures`` draws docs/pictures.

A picture shows one operation of a window: the row before it, and the row or rows after it. The colour of a
chunk says what the operation did to its KV.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"

COLOURS = {
    "system": ("#eaeef2", "#8c959f"),
    "stays": ("#ddf4ff", "#54aeff"),
    "turned": ("#dafbe1", "#4ac26b"),
    "patched": ("#dafbe1", "#4ac26b"),
    "sampled": ("#dafbe1", "#4ac26b"),
    "run": ("#ffebe9", "#ff8182"),
    "survives": ("#fff8c5", "#d4a72c"),
    "leaves": ("#ffffff", "#8c959f"),
    "stored": ("#ffffff", "#54aeff"),
}
MEANINGS = {
    "stays": "stands as it stood",
    "turned": "keys turned, nothing run",
    "patched": "turned, with its patch",
    "sampled": "a quarter of its tokens runs",
    "run": "runs through the model",
    "survives": "still knows what has left",
    "stored": "in the store",
}
TABS = {"patched": "#8250df", "sampled": "#ff8182"}
_LEFT, _WIDTH, _HEIGHT, _GAP, _STEP = 170, 92, 40, 8, 58


@dataclass(frozen=True)
class Row:
    """A window at one moment: its chunks, each as ``text:kind``, and what is said beside it."""

    title: str
    chunks: str
    note: str = ""

    def boxes(self) -> list[tuple[str, str]]:
        """Text and kind of each chunk."""
        return [
            (text.replace("_", " "), kind)
            for text, _, kind in (c.partition(":") for c in self.chunks.split())
        ]


PICTURES = {
    "append": [
        Row("before", "system:system 1:stays 2:stays"),
        Row("append(3)", "system:system 1:stays 2:stays 3:run", "1 forward, 1 vision encode"),
    ],
    "slide": [
        Row("before", "system:system 1:stays 2:stays 3:stays"),
        Row("slide(): kept", "system:turned 1:leaves 2:survives 3:survives", "0 forwards"),
        Row("by stored patches", "system:turned 1:leaves 2:patched 3:patched", "0 forwards"),
        Row("by samples", "system:turned 1:leaves 2:sampled 3:sampled", "1 forward of a quarter"),
        Row("by a forward", "system:turned 1:leaves 2:run 3:run", "1 forward, 0 vision encodes"),
    ],
    "recall": [
        Row("before", "system:system 2:stays 3:stays 1:stored"),
        Row("recall(1)", "system:system 2:stays 3:stays 1:patched", "0 forwards with a stored patch"),
        Row("without a patch", "system:system 2:stays 3:stays 1:run", "1 forward, 0 vision encodes"),
    ],
    "reorder": [
        Row("before", "system:system 1:stays 2:stays 3:stays"),
        Row(
            "reorder([2, 0, 1])",
            "system:system 3:turned 1:patched 2:patched",
            "0 forwards with stored patches",
        ),
        Row("without patches", "system:system 3:run 1:run 2:run", "1 forward, 0 vision encodes"),
    ],
    "replace": [
        Row("before", "system:system 1:stays 2:stays 3:stays"),
        Row("replace(2, 4)", "system:system 1:stays 4:run 3:run", "1 forward, 1 vision encode"),
    ],
    "condition": [
        Row("before", "system:system 1:stays 2:stays 3:stays"),
        Row(
            "condition(3, False)",
            "system:system 1:stays 2:stays 3:turned",
            "3 as if it stood alone; and back",
        ),
    ],
    "fork": [
        Row("window", "system:system 1:stays 2:stays 3:stays"),
        Row("its fork", "system:system 1:stays 2:stays 4:run", "shares all but 4"),
    ],
    "generate": [
        Row("before", "system:system 1:stays 2:stays"),
        Row(
            "generate(question)",
            "system:system 1:stays 2:stays question:run answer:run",
            "the question alone runs",
        ),
        Row("afterwards", "system:system 1:stays 2:stays", "the window is as it was"),
    ],
    "turn": [
        Row("turn 4", "system:system pic_1:stays step:stays pic_2:stays answer:stays"),
        Row(
            "turn 5", "system:system step:survives pic_2:survives answer:survives pic_3:run", "mode amortize"
        ),
        Row("or", "system:system step:run pic_2:run answer:run pic_3:run", "mode forget"),
        Row(
            "or, prepared",
            "system:system step:stays pic_2:stays answer:stays pic_3:run",
            "after anticipate()",
        ),
    ],
}


def draw(rows: list[Row]) -> str:
    """One picture, as SVG."""
    wide = max(_LEFT + (_WIDTH + _GAP) * len(row.boxes()) + 7 * len(row.note) for row in rows) + 20
    kinds = [kind for kind in MEANINGS if any(kind == k for row in rows for _, k in row.boxes())]
    lines = _lines(kinds, wide)
    high = 20 + _STEP * len(rows) + 22 * len(lines) + 8
    body = "\n".join([*_rows(rows), *_legend(lines, 20 + _STEP * len(rows) + 14)])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" height="{high}" '
        'font-family="system-ui, sans-serif" font-size="14" fill="#24292f">\n'
        f'<rect width="{wide}" height="{high}" rx="8" fill="#ffffff" stroke="#d0d7de"/>\n{body}\n</svg>\n'
    )


def _rows(rows: list[Row]) -> Iterator[str]:
    for number, row in enumerate(rows):
        top = 20 + _STEP * number
        yield f'<text x="16" y="{top + 25}">{escape(row.title)}</text>'
        for place, (text, kind) in enumerate(row.boxes()):
            yield _box(_LEFT + (_WIDTH + _GAP) * place, top, text, kind)
        after = _LEFT + (_WIDTH + _GAP) * len(row.boxes()) + 8
        yield f'<text x="{after}" y="{top + 25}" font-size="12" fill="#57606a">{escape(row.note)}</text>'


def _box(x: int, y: int, text: str, kind: str) -> str:
    faint = ' opacity=".45"' if kind == "leaves" else ""
    shown = _rect(x, y, _WIDTH, _HEIGHT, 6, kind, faint)
    if kind in TABS:
        shown += (
            f'<rect x="{x + 6}" y="{y + 32}" width="{_WIDTH - 12}" height="5" rx="2" fill="{TABS[kind]}"/>'
        )
    middle = f'x="{x + _WIDTH // 2}" y="{y + 25}" text-anchor="middle"'
    return f"{shown}<text {middle}{faint}>{escape(text)}</text>"


def _rect(x: int, y: int, width: int, height: int, round_: int, kind: str, more: str = "") -> str:
    fill, edge = COLOURS[kind]
    dash = ' stroke-dasharray="4 3"' if kind in ("leaves", "stored") else ""
    size = f'x="{x}" y="{y}" width="{width}" height="{height}" rx="{round_}"'
    return f'<rect {size} fill="{fill}" stroke="{edge}"{dash}{more}/>'


def _wide(kind: str) -> int:
    return 34 + 7 * len(MEANINGS[kind])


def _lines(kinds: list[str], wide: int) -> list[list[str]]:
    """The legend in lines that fit."""
    lines: list[list[str]] = [[]]
    for kind in kinds:
        if sum(map(_wide, [*lines[-1], kind])) > wide - 16:
            lines.append([])
        lines[-1].append(kind)
    return lines


def _legend(lines: list[list[str]], top: int) -> Iterator[str]:
    for number, line in enumerate(lines):
        x, y = 16, top + 22 * number
        for kind in line:
            yield _rect(x, y - 10, 12, 12, 3, kind)
            if kind in TABS:
                yield f'<rect x="{x + 2}" y="{y - 2}" width="8" height="3" rx="1" fill="{TABS[kind]}"/>'
            yield f'<text x="{x + 18}" y="{y}" font-size="12" fill="#57606a">{MEANINGS[kind]}</text>'
            x += _wide(kind)


def main() -> None:
    """Draw all pictures."""
    FOLDER.mkdir(exist_ok=True)
    for name, rows in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
