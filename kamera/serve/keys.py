"""API keys, and the tenants that they stand for."""

from __future__ import annotations

import hashlib
import hmac

from starlette.requests import Request

from kamera.serve.refusal import Refusal


class Keys:
    """The tenants by key, of whom one may have several; without keys everybody is the one tenant "".

    Only digests are held, and every look-up compares with each of them in constant time.
    """

    def __init__(self, tenants: dict[str, str] | None = None) -> None:
        self._tenants = [(_digest(key), tenant) for key, tenant in (tenants or {}).items()]

    def __bool__(self) -> bool:
        """True if a key is asked for."""
        return bool(self._tenants)

    def tenant(self, request: Request) -> str:
        """Whose request it is. Raises Refusal."""
        if not self._tenants:
            return ""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        given = key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        digest = _digest(given)
        fitting = [tenant for held, tenant in self._tenants if hmac.compare_digest(held, digest)]
        if not fitting:
            message = "no valid key: send it as Authorization: Bearer or as x-api-key"
            raise Refusal(401, message, None, "invalid_api_key")
        return fitting[0]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
