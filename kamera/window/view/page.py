"""Draws lives as one HTML file with style, script and data inside, which loads nothing from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape
from importlib.resources import files
from typing import Any

from kamera.patches import GUARANTEES
from kamera.window.events import Event
from kamera.window.view.story import FIELDS, lives


def page(events: Iterable[Event], *, title: str = "A window's life", live: bool = False) -> str:
    """The page of these events, an HTML document.

    ``live``: it goes on, by the server-sent events of ``events`` beside it, each a `document` in JSON.
    """
    parts = {name: files("kamera.window.view").joinpath(name).read_text("utf-8") for name in _PARTS}
    html = parts["page.html"].replace("<!--title-->", escape(title))
    html = html.replace("/*style*/", parts["page.css"]).replace("/*script*/", parts["page.js"])
    return html.replace("<!--data-->", embedded({**document(events), "title": title, "live": live}))


def document(events: Iterable[Event]) -> dict[str, Any]:
    """All that a page shows, as JSON types."""
    told = [life.to_document() for life in lives(events)]
    return {"fields": FIELDS, "guarantees": GUARANTEES, "lives": told}


def embedded(value: Any) -> str:
    """JSON for the inside of a script element: whatever a text says, it ends no element and begins none."""
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def framed(html: str) -> str:
    """A page inside another document, a notebook's say, which it can neither read nor change."""
    style = "width:100%;height:900px;border:0"
    return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{escape(html)}"></iframe>'


_PARTS = ("page.html", "page.css", "page.js")
