"""Pages: of a window's life, and of measurements. Values in, one HTML file out. It knows no model."""

from kamera.window.view.export import chrome_trace, record_spans
from kamera.window.view.measured import Measured, Way, measured_page
from kamera.window.view.page import document, framed, page
from kamera.window.view.story import Life, Lives, lives

__all__ = [
    "Life",
    "Lives",
    "Measured",
    "Way",
    "chrome_trace",
    "document",
    "framed",
    "lives",
    "measured_page",
    "page",
    "record_spans",
]
