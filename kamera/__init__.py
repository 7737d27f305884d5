"""Kamera: the context window of a vision agent as a deque, by position-free KV and small patches."""

from kamera import errors
from kamera.backbones import Backbone, Chunk, Clip, read_video
from kamera.errors import KameraError
from kamera.ops import Patch
from kamera.sessions import ChatSession, Turn
from kamera.store import ChunkStore
from kamera.window import Certificate, KameraWindow, Report, ReusePolicy, Slot

__version__ = "0.1.0"

__all__ = [
    "Backbone",
    "Certificate",
    "ChatSession",
    "Chunk",
    "ChunkStore",
    "Clip",
    "KameraError",
    "KameraWindow",
    "Patch",
    "Report",
    "ReusePolicy",
    "Slot",
    "Turn",
    "__version__",
    "errors",
    "read_video",
]
