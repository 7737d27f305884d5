"""What else an agent may say about a span: pin, decay, evict, share (after Leyline, appendix J).

The fifth verb, scratch, is an argument of `ChatSession.send`: its span is never in the history.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kamera.edits.directive import Directive, Mode, Unit
from kamera.errors import InvalidDirective
from kamera.store import ChunkStore


@dataclass(frozen=True)
class Span:
    """``start:end`` of a conversation, counted in ``unit``.

    Raises InvalidDirective for an unknown unit, or a span that ends before it starts.
    """

    start: int
    end: int
    unit: Unit = "messages"

    def __post_init__(self) -> None:
        Directive(self.start, self.end, unit=self.unit)  # checks them


@dataclass(frozen=True)
class Pin(Span):
    """Keep the span's stored objects through `gc` and byte limits, for ``ttl`` seconds or for good.

    The store's cap of pinned bytes (`StoreAdmin.pins`) is never exceeded. A pin keeps KV, not messages: the
    span may leave the prompt, and comes back without an encode. Raises InvalidDirective for a ``ttl`` of 0 or
    less.
    """

    ttl: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ttl is not None and not self.ttl > 0:
            raise InvalidDirective(f"ttl={self.ttl} is no limit: give more than 0, or None")


@dataclass(frozen=True)
class Decay(Span):
    """Move the span's stored objects to a lower tier: the next step is unlikely to need them.

    They leave the store's memory for its directory or remote; where memory is all, they are the first to be
    evicted from it.
    """


@dataclass(frozen=True)
class Evict(Span):
    """Remove the span from the prompt, as the `Directive` does; pictures keep their encodings."""

    replacement: str | Sequence[int] | None = None
    mode: Mode = "auto"

    @property
    def directive(self) -> Directive:
        """The same as a directive."""
        return Directive(self.start, self.end, self.replacement, self.mode, self.unit)


@dataclass(frozen=True)
class Share(Span):
    """Make the span's chunks available now, to ``scope``.

    None: every session of this tenant. A store of another tenant, which its caller must hold: that tenant
    too. Only encodings and canonicals are shared, which depend on the chunk and the system prompt; never
    patches, which depend on the conversation before it.
    """

    scope: ChunkStore | None = None


Verb = Pin | Decay | Evict | Share
"""What `ChatSession.apply` takes."""
