"""The page of a window's life: events in, one HTML file out. It knows no model."""

from kamera.window.view.export import chrome_trace, record_spans
from kamera.window.view.page import document, framed, page
from kamera.window.view.story import Life, lives

__all__ = ["Life", "chrome_trace", "document", "framed", "lives", "page", "record_spans"]
