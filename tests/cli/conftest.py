from __future__ import annotations

from tests.store.conftest import _s3, _server, s3, server

__all__ = ["_s3", "_server", "s3", "server"]
