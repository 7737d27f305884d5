"""Kamera: a vision agent's context window as a deque, by position-free KV and small patches."""

from importlib import import_module
from typing import TYPE_CHECKING

from kamera import errors
from kamera.errors import KameraError

if TYPE_CHECKING:
    from kamera.content import Chunk, Clip, MediaLimits, read_video
    from kamera.edits import Directive, policies
    from kamera.engines.hf import Backbone
    from kamera.ops import Patch
    from kamera.sessions import ChatSession, SessionPool, Turn
    from kamera.store import ChunkStore
    from kamera.trust import ReusePolicy
    from kamera.window import KameraWindow, Report, Slot

__version__ = "0.1.0"

__all__ = [
    "Backbone",
    "ChatSession",
    "Chunk",
    "ChunkStore",
    "Clip",
    "Directive",
    "KameraError",
    "KameraWindow",
    "MediaLimits",
    "Patch",
    "Report",
    "ReusePolicy",
    "SessionPool",
    "Slot",
    "Turn",
    "__version__",
    "errors",
    "policies",
    "read_video",
]

if not TYPE_CHECKING:
    # importing torch and transformers takes seconds, so the first name that needs them imports them
    _ROOMS = {
        "kamera.content": ("Chunk", "Clip", "MediaLimits", "read_video"),
        "kamera.edits": ("Directive", "policies"),
        "kamera.engines.hf": ("Backbone",),
        "kamera.ops": ("Patch",),
        "kamera.sessions": ("ChatSession", "SessionPool", "Turn"),
        "kamera.store": ("ChunkStore",),
        "kamera.trust": ("ReusePolicy",),
        "kamera.window": ("KameraWindow", "Report", "Slot"),
    }
    _ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}

    def __getattr__(name):
        if name not in _ROOM_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_ROOM_OF[name]), name)
        return value

    def __dir__():
        return sorted({*globals(), *__all__})
