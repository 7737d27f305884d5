"""API keys, and the tenants that they stand for."""

from __future__ import annotations

import base64
import hashlib
import hmac

from starlette.requests import Request

from kamera.errors import quote
from kamera.serve.refusal import Refusal

LOCAL = ("127.0.0.1", "localhost", "::1")
"""Names by which a machine calls itself."""


class Keys:
    """The tenants by key, of whom one may have several; without keys everybody on this machine is the one "".

    A key is a bearer's, ``x-api-key``, or the password that a browser asks for. Only digests are held, and
    every look-up compares with each of them in constant time.
    """

    def __init__(self, tenants: dict[str, str] | None = None) -> None:
        self._tenants = [(_digest(key), tenant) for key, tenant in (tenants or {}).items()]

    def tenant(self, request: Request) -> str:
        """Whose request it is. Raises Refusal."""
        if not self._tenants:
            host = request.url.hostname or ""
            if host not in LOCAL:  # a page of another origin, whose name was led here
                raise Refusal(403, f"without keys only 127.0.0.1 and localhost answer, not {quote(host)}")
            return ""
        digest = _digest(_key(request))
        fitting = [tenant for held, tenant in self._tenants if hmac.compare_digest(held, digest)]
        if not fitting:
            message = "no valid key: send it as Authorization: Bearer or as x-api-key"
            raise Refusal(401, message, None, "invalid_api_key")
        return fitting[0]


def _key(request: Request) -> str:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return given.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(given).decode().partition(":")[2]
        except ValueError:
            return ""
    return request.headers.get("x-api-key", "")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
