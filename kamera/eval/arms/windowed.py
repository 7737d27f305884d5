"""Arms that are `KameraWindow`s, each over a store of its own."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kamera.eval.adapter import ArmQuestion, Reply, Unit
from kamera.eval.desk import Desk
from kamera.store import CanonicalRecord, ChunkStore, EncodingRecord
from kamera.trust import OnLeave, ReusePolicy
from kamera.window import Arrange, KameraWindow


class Windowed:
    """A `KameraWindow` over a store of its own; ``on_leave`` as in `kamera.window.Arrange`."""

    rehearsed = False

    def __init__(self, desk: Desk, on_leave: OnLeave) -> None:
        self.desk, self.on_leave = desk, on_leave
        self.store = ChunkStore.open("memory://")
        policy = ReusePolicy(minimum="patched", forms="always")
        self.window = KameraWindow(desk.backbone, self.store, desk.system, policy=policy)
        self.order: tuple[str, ...] = ()
        self._spent = (0, 0)

    def encode(self, unit: Unit) -> None:
        """Store the unit's encoding and canonical, computed once for all traces of an item."""
        unit.check_reusable()
        chunk = self.desk.chunk(unit)
        key = ("records", unit.name)
        if key not in self.desk.prepared:
            self.window.append(chunk)
            self.window.evict(len(self.window) - 1)
            self.desk.prepared[key] = _records(self.store, chunk.id)
        for record in self.desk.prepared[key]:
            self.store.put(record)

    def place(self, order: Sequence[str]) -> None:
        """One `arrange`."""
        slots = dict(zip(self.order, self.window.slots, strict=True))
        wanted = [slots.get(name) or self.desk.chunks[name] for name in order]
        report = self.window.run(Arrange(wanted, on_leave=self.on_leave))
        self.order, self._spent = tuple(order), (report.tokens_recomputed, report.forwards)

    def ask(self, query: ArmQuestion) -> Reply:
        """Behind the window; live parts are appended to a fork of it."""
        window, started = self.window, time.perf_counter()
        if query.live:
            window = self.window.fork()
            for unit in query.live:
                window.append(self.desk.chunk(unit), archive="later")
        logits = window.next_token_logits(query.text).cpu()
        seconds = time.perf_counter() - started
        if query.max_new_tokens == 1:
            text = self.desk.backbone.builder.detokenize(logits.argmax()[None]) or ""
        else:
            text = window.generate(query.text, max_new_tokens=query.max_new_tokens, do_sample=False)
        kept = sum(info.bytes for info in self.store.ls() if info.kind not in ("anchor", "encoding"))
        tokens = self.desk.tokens(self.order)
        return Reply(text, logits, seconds, float(self._spent[0]), kept, tokens, self._spent[1])


def _records(store: ChunkStore, chunk_id: str) -> list[CanonicalRecord | EncodingRecord]:
    """Canonical and encoding of a chunk."""
    found = [
        store.get_encoding(info.context.fingerprint, chunk_id)
        if info.kind == "encoding"
        else store.get_canonical(info.context, chunk_id)
        for info in store.ls(chunk_id=chunk_id)
        if info.kind in ("encoding", "canonical")
    ]
    return [record for record in found if record is not None]
