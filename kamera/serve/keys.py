"""API keys, and the tenants that they stand for."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from starlette.requests import Request

from kamera.serve.refusal import Refusal


class Keys:
    """The tenants by key; without keys everybody is the one tenant "".

    Only digests are held, and every look-up compares with each of them in constant time.
    """

    def __init__(self, tenants: dict[str, str] | None = None) -> None:
        held = {} if tenants is None else tenants
        self._tenants = [(_digest(key), tenant) for key, tenant in held.items()]

    @classmethod
    def read(cls, path: Path) -> Keys:
        """Keys from a file: a tenant and its key in each line; a tenant may have several.

        Raises ValueError for another line, a short key, or one that two tenants have.
        """
        found: dict[str, str] = {}
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            if len(words) != 2 or len(words[1]) < 16 or words[1] in found:
                raise ValueError(
                    f"{path}:{number}: give a tenant and a key of its own, of 16 characters or more"
                )
            found[words[1]] = words[0]
        if not found:
            raise ValueError(f"{path} has no keys: give a tenant and its key in each line")
        return cls(found)

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
            raise Refusal(
                401, "no valid key: send it as Authorization: Bearer or as x-api-key", None, "invalid_api_key"
            )
        return fitting[0]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
