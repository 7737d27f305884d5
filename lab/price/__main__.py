"""``python -m lab.price chats …``, ``… agents …`` and ``… http …``; each takes ``--help``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lab.price import agents, chats, http

_TABLES = {"chats": chats.main, "agents": agents.main, "http": http.main}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the table that the first argument names."""
    name, *rest = list(sys.argv[1:] if arguments is None else arguments) or [""]
    if name not in _TABLES:
        print(f"python -m lab.price {' | '.join(_TABLES)}: {name!r} is none of them", file=sys.stderr)
        return 2
    _TABLES[name](rest)
    return 0


if __name__ == "__main__":
    sys.exit(main())
