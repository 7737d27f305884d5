"""The page of a window's life. Events in, one HTML file out. It knows no model."""

from kamera.window.view.page import document, page
from kamera.window.view.story import Life, Lives, lives

__all__ = ["Life", "Lives", "document", "lives", "page"]
