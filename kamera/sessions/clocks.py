"""System prompts that change from request to request, a wall clock in them say: no cache can help there."""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from collections.abc import Sequence

from kamera.content import Message
from kamera.errors import quote
from kamera.ops import digest

logger = logging.getLogger(__name__)

_MOST = 256
_CHANGES = 3
"""Prompts that differ in numbers alone, from which on they are told of."""


class Clocks:
    """Warns once of each system prompt that comes again and again with other numbers."""

    def __init__(self) -> None:
        self._forms: OrderedDict[str, set[str]] = OrderedDict()

    def note_system_prompt(self, tenant: str, messages: Sequence[Message]) -> None:
        """Note the system prompt of a request."""
        first = messages[0].get("content") if messages and messages[0].get("role") == "system" else None
        if not isinstance(first, str) or not (numbers := re.findall(r"\d+", first)):
            return
        number_digests = self._forms.setdefault(digest(tenant, re.sub(r"\d+", "0", first)), set())
        if len(number_digests) < _CHANGES:
            number_digests.add(digest(*numbers))
            if len(number_digests) == _CHANGES:
                logger.warning(
                    "the system prompt changes in its numbers alone from request to request (%s): all behind "
                    "it is prefilled each time; put a clock or counter into the last message",
                    quote(first[-60:]),
                )
        while len(self._forms) > _MOST:
            self._forms.popitem(last=False)
