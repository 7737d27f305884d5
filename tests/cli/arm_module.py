"""An arm from outside: it reuses nothing."""

from __future__ import annotations

from kamera.eval.reuse.plain import Exact


class Nothing(Exact):
    """Everything anew, under another name."""

    name = "nothing"


ARMS = {"nothing": Nothing}
