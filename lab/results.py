"""Files of what was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def keep(document: Mapping[str, Any], path: Path) -> None:
    """Write a measured document as JSON, a value a line; its folder is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
