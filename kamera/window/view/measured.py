"""A page of measurements: ways of doing one thing, each with its cost, its shares and their intervals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from html import escape

from kamera.trust import Estimate
from kamera.window.view.page import whole

_COLOURS = ("accent", "rival", "survivor")
_WIDE, _HIGH, _EDGE = 300, 15, 18
_VERDICTS = {"safe": "exact", "unsafe": "blind", "cannot tell": "survivor"}


@dataclass(frozen=True)
class Way:
    """One way: a share for each of its table's ``shares`` (None: not measured), and further values as texts.

    ``cost`` is drawn as a bar; the ``note`` stands below the name.
    """

    name: str
    shares: tuple[Estimate | None, ...]
    values: tuple[str, ...] = ()
    cost: float | None = None
    verdict: str = ""
    note: str = ""


@dataclass(frozen=True)
class Measured:
    """Ways to compare. ``shares`` and ``columns`` name what each has, ``cost`` what is drawn as a bar."""

    title: str
    shares: tuple[str, ...]
    ways: tuple[Way, ...]
    columns: tuple[str, ...] = ()
    cost: str = ""


def measured_page(title: str, facts: Mapping[str, object], tables: Iterable[Measured]) -> str:
    """The page of these tables, an HTML document that loads nothing and runs nothing."""
    told = "".join(f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in facts.items())
    cards = [f'<section class="card"><dl>{told}</dl></section>', *map(_card, tables)]
    return whole(title, "\n".join(cards))


def _card(table: Measured) -> str:
    cost = f"<th>{escape(table.cost)}</th>" if table.cost else ""
    names = ["<th></th>", cost, f"<th>{_axis(table)}</th>"]
    names += [f'<th class="n">{escape(name)}</th>' for name in table.columns]
    most = max((way.cost or 0 for way in table.ways), default=0) or 1
    rows = "".join(f"<tr>{''.join(_cells(way, table, most))}</tr>" for way in table.ways)
    title = f"<h2>{escape(table.title)}</h2>"
    return f"""<section class="card">{title}<div class="wide-scroll"><table class="measured">
<thead><tr>{"".join(names)}</tr></thead><tbody>{rows}</tbody></table></div></section>"""


def _cells(way: Way, table: Measured, most: float) -> Iterator[str]:
    chip = f'<span class="dot" style="background:var(--{_VERDICTS.get(way.verdict, "rival")})"></span>'
    verdict = f'<span class="chip">{chip}{escape(way.verdict)}</span>' if way.verdict else ""
    note = f'<div class="what">{escape(way.note)}</div>' if way.note else ""
    yield f"<th scope='row'><b>{escape(way.name)}</b> {verdict}{note}</th>"
    if table.cost:
        cost = way.cost or 0
        fill = f'<span class="fill" style="width:{100 * cost / most:.0f}px"></span>'
        yield f'<td class="cost">{fill}<span>{cost:,.4g}</span></td>'
    yield f"<td>{_strip(way, table)}</td>"
    yield from (f'<td class="n">{escape(value)}</td>' for value in way.values)


def _axis(table: Measured) -> str:
    """The legend of a table's shares, above the ends of their scale."""
    dot = '<span class="dot" style="background:var(--{})"></span>{}'
    told = " ".join(dot.format(c, escape(n)) for c, n in zip(_COLOURS, table.shares, strict=False))
    ends = "".join(f'<text class="small quiet" x="{_x(at)}" y="11">{at:.0%}</text>' for at in (0, 0.5, 1))
    return f'{told}<svg width="{_WIDE}" height="14" aria-hidden="true" text-anchor="middle">{ends}</svg>'


def _strip(way: Way, table: Measured) -> str:
    """Each share as a point with its interval, on a scale from 0 to 1; numbers beside for those who read."""
    high, drawn, said = _HIGH * len(table.shares) + 4, list[str](), list[str]()
    for at in (0, 0.5, 1):
        drawn.append(f'<line x1="{_x(at)}" x2="{_x(at)}" y1="0" y2="{high}" stroke="var(--line)"/>')
    for i, (name, share) in enumerate(zip(table.shares, way.shares, strict=True)):
        if share is None or math.isnan(share.mean):
            continue
        y, colour = 9 + _HIGH * i, f"var(--{_COLOURS[i]})"
        span = f'x1="{_x(share.low)}" x2="{_x(share.high)}" y1="{y}" y2="{y}"'
        drawn.append(f'<line {span} stroke="{colour}" stroke-width="3" stroke-linecap="round"/>')
        drawn.append(f'<circle cx="{_x(share.mean)}" cy="{y}" r="5" fill="{colour}"/>')
        said.append(f"{name} {share.mean:.2f} ({share.low:.2f} to {share.high:.2f})")
    told = escape(", ".join(said))
    picture = f'<svg width="{_WIDE}" height="{high}" role="img" aria-label="{told}">{"".join(drawn)}</svg>'
    return f'{picture}<div class="what">{told}</div>'


def _x(share: float) -> str:
    return f"{_EDGE + (_WIDE - 2 * _EDGE) * min(1.0, max(0.0, share)):.1f}"
