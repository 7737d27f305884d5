"""A request that is not answered: an HTTP status, and one line that names what, which value, what to do."""

from __future__ import annotations

import logging
import os
import re
from typing import Any

from kamera import errors

logger = logging.getLogger(__name__)

_STATUS: dict[type[Exception], int] = {
    errors.SessionConflict: 409,
    errors.UnknownSession: 404,
    errors.StoreFull: 507,
    errors.PinsFull: 507,
    errors.RemoteUnavailable: 503,
    errors.EngineFailed: 502,
    errors.WindowFull: 400,
}
_ASKED = {"www-authenticate": 'Basic realm="kamera: a key as the password"'}  # for browsers
_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


_PATH = re.compile(r"(?<![\w:/.~])/[^\s'\"`,;:()<>/]+(?:/[^\s'\"`,;:()<>/]+)+/?")
"""A path of two parts or more, which is no part of an address."""


class Refusal(Exception):
    """An error for the client; ``place`` is the field's, ``wait`` seconds after which to try again."""

    def __init__(
        self, status: int, message: str, place: str | None = None, code: str | None = None, wait: int = 0
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.place, self.code = status, message, place, code
        self.headers = {"retry-after": str(wait)} if wait else _ASKED if status == 401 else {}
        self.type = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")

    def openai(self) -> dict[str, Any]:
        """The body in OpenAI's form."""
        told = {"message": self.message, "type": self.type}
        return {"error": {**told, "param": self.place, "code": self.code}}

    def anthropic(self) -> dict[str, Any]:
        """The body in Anthropic's form."""
        return {"type": "error", "error": {"type": self.type, "message": self.message}}


def without_paths(text: str) -> str:
    """A text in which each path of this machine is the name of its file: no client need know where it is."""
    return _PATH.sub(_name_of, text)


def _name_of(match: re.Match[str]) -> str:
    path = match[0]
    top = "/" + path.split("/")[1]
    return path.rstrip("/").rpartition("/")[2] if os.path.lexists(top) else path


def refusal_of(error: BaseException) -> Refusal:
    """What a client is told of an error; of one that is no refusal only that it happened."""
    if isinstance(error, Refusal):
        return error
    line = " ".join(str(error).split())
    if not isinstance(error, errors.InvalidRequest):  # that quotes what its client has sent
        line = without_paths(line)
    found = [status for kind, status in _STATUS.items() if isinstance(error, kind)]
    if found or isinstance(error, ValueError):  # a caller's mistake by house rule, most refusals among them
        place = error.place if isinstance(error, errors.InvalidRequest) else None
        code = "context_length_exceeded" if isinstance(error, errors.WindowFull) else None
        return Refusal(next(iter(found), 400), line, place, code)
    logger.error("a request failed", exc_info=error)
    known = isinstance(error, errors.KameraError)
    return Refusal(500, line if known else "the server failed on this request")
