"""The remote tier: objects as blobs in Redis, an object store, or a shared file system.

Nothing a remote says is believed: what it returns is an object only after the codec has verified it.
"""

from kamera.store.remote.tier import RemoteTier
from kamera.store.remote.urls import SCHEMES, is_remote, open_remote

__all__ = ["SCHEMES", "RemoteTier", "is_remote", "open_remote"]
