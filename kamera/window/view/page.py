"""Draws lives as one HTML file with style, script and data inside, which loads nothing from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from kamera.trust import GUARANTEES
from kamera.window.events import Event
from kamera.window.view.story import FIELDS, lives


def page(events: Iterable[Event], *, title: str = "A window's life", live: bool = False) -> str:
    """The page of these events, an HTML document.

    ``live``: it goes on, by the server-sent events of ``events`` beside it: a `document` in JSON of the lives
    that went on.
    """
    content = document([life.to_document() for life in lives(events)]) | {"title": title, "live": live}
    data = f'<script type="application/json" id="data">{embed_json(content)}</script>'
    return html_document(title, _part("life.html"), f"{data}\n<script>\n{_part('page.js')}</script>")


def html_document(title: str, body: str, script: str = "") -> str:
    """A document of Kamera's look with this title (a text), body and script (HTML)."""
    html = _part("page.html").replace("<!--title-->", escape(title)).replace("/*style*/", _part("page.css"))
    return html.replace("<!--body-->", body).replace("<!--script-->", script)


def document(told: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All that a page shows of these lives (`Life.to_document`), as JSON types."""
    return {"fields": FIELDS, "guarantees": GUARANTEES, "lives": told}


def embed_json(value: Any) -> str:
    """JSON for the inside of a script element: whatever a text says, it ends no element and begins none."""
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _part(name: str) -> str:
    return files("kamera.window.view").joinpath(name).read_text("utf-8")
