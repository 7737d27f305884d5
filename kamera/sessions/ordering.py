"""What a window shall hold for a prompt, under each treatment of the segments behind an edit."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from kamera.content import Chunk, Extent, ProcessedMedia, Rendered
from kamera.sessions.anchors import Anchors
from kamera.sessions.layout import Layout, Piece, Run, laid_out
from kamera.sessions.modes import Order
from kamera.trust import OnLeave


@dataclass
class Orders:
    """The orders of a ``prompt`` in a window whose layout was ``before``.

    ``media`` are its pictures and clips, by digest, ``again`` the extents that came before
    elsewhere; ``apart`` and ``samples`` as in `laid_out`. A new chunk is made once.
    """

    anchors: Anchors
    prompt: Rendered
    before: Layout | None
    media: Mapping[str, ProcessedMedia]
    again: Collection[Extent] = ()
    apart: bool = False
    samples: bool = False
    _pieces: dict[OnLeave, list[Piece]] = field(default_factory=dict)
    _made: dict[Run, Chunk] = field(default_factory=dict)

    def under(self, on_leave: OnLeave) -> Order:
        """What the window shall hold."""
        pieces = self._pieces[on_leave] = laid_out(
            self.prompt, self.before, on_leave, apart=self.apart, again=self.again, samples=self.samples
        )
        new = [run for run, slot in pieces if slot is None]
        for run in new:
            if run not in self._made:
                self._made[run] = self._chunk(run)
        recurring = dict.fromkeys(self._made[run].id for run in new if self._extent(run) in self.again)
        return Order([self._made[run] if slot is None else slot for run, slot in pieces], tuple(recurring))

    def layout(self, on_leave: OnLeave) -> Layout:
        """The window's layout once it holds that."""
        return Layout(self.prompt, tuple([run for run, _ in self._pieces[on_leave]]))

    # -- inside --------------------------------------------------------------------------------

    def _extent(self, run: Run) -> Extent:
        return self.prompt.segments[run[0]].start, self.prompt.segments[run[1] - 1].stop

    def _chunk(self, run: Run) -> Chunk:
        first, (start, stop) = self.prompt.segments[run[0]], self._extent(run)
        backbone = self.anchors.backbone
        shown = None if first.media is None else self.media[first.media]
        inputs, accepted = {} if shown is None else shown.inputs, set(backbone.builder.accepted)
        given = {name: value for name, value in inputs.items() if name in accepted}
        picture = None if shown is None else shown.picture
        return backbone.chunk_from_tensors(
            self.prompt.ids[start:stop], label=first.role, picture=picture, **given
        )
