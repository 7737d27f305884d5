"""Log records as one JSON object a line, for machines that read them.

The package logs through the standard ``logging`` and never configures it. No record holds prompt
text, pixels or tensors: ids are digests, and messages name objects, paths and reasons.
"""

from __future__ import annotations

import json
import logging
from datetime import datetime, timezone


class JsonFormatter(logging.Formatter):
    """``time`` (UTC), ``level``, ``logger``, ``message``; with an exception also ``error`` and ``at``.

        handler = logging.StreamHandler()
        handler.setFormatter(JsonFormatter())
        logging.getLogger("kamera").addHandler(handler)

    Extra attributes of a record are left out, as their content is unchecked. So is the traceback: ``at``
    is the module and line of the log call.
    """

    def format(self, record: logging.LogRecord) -> str:
        """One line, ASCII."""
        told = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info and record.exc_info[0] is not None:
            told["error"] = record.exc_info[0].__name__
            told["at"] = f"{record.module}:{record.lineno}"
        return json.dumps(told)
