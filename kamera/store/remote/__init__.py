"""The remote tier: objects as blobs in Redis, an object store, or a shared file system.

A remote is not trusted: the bytes it returns are an object only after the codec has verified them.
"""

from kamera.store.remote.tier import RemoteTier
from kamera.store.remote.urls import SCHEMES, is_remote, open_remote

__all__ = ["SCHEMES", "RemoteTier", "is_remote", "open_remote"]
