"""The parts of a window that act on its plans."""

from __future__ import annotations

import operator
from dataclasses import dataclass

from kamera.engines import LiveKV, Span
from kamera.patches import Before, Former
from kamera.window.places import Standing
from kamera.window.report import Tally
from kamera.window.state import WindowState


@dataclass(frozen=True)
class Stage:
    """The parts that act on plans: the former, the live cache, and the positions of chunks."""

    former: Former
    live: LiveKV
    standing: Standing

    def show(self, state: WindowState, tally: Tally, behind: int = 0) -> None:
        """Make the live cache show ``state``, with room for ``behind`` more tokens."""
        tally.add(self.live.show(self.spans(state), room=behind))

    def spans(self, state: WindowState) -> list[Span]:
        """The spans of the anchor and of the chunks of ``state``."""
        return [Span(self.former.anchor.kv, None, state.frame), *[r.span for r in state.residents]]

    def before(self, state: WindowState, offset: tuple[int, ...]) -> Before:
        """What stands before a chunk that comes next, ``offset`` from where its KV was computed."""
        shift = tuple(map(operator.add, state.shift, state.frame))
        chunks = tuple(resident.facts for resident in state.residents)
        return Before(tuple(self.spans(state)), chunks, offset, shift)
