"""The page of lives that go on, served; it needs ``pip install 'kamera[serve]'``."""

from kamera.window.view.live.server import Page, PageServer, bound

__all__ = ["Page", "PageServer", "bound"]
