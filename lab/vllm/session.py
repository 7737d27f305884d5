"""One arm of the session: an engine in this process, a window over it, and what both ran, turn by turn."""

from __future__ import annotations

import importlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kamera import Backbone, ChunkStore, ReusePolicy
from kamera.engines import EngineCompletion, EnginePrompt
from kamera.engines.vllm.clients import Offline
from kamera.window import EngineWindow
from lab.vllm.bed import PICTURES, pictures_directory, scheduler_of, start
from lab.vllm.composing import form_terms, put_composed
from lab.vllm.stream import Turn

PREFIX = "prefix cache"
WARMED = "prefix cache, warmed"
SURVIVOR, FORMED, COMPOSED = "survivor", "formed", "composed"
ARMS = (PREFIX, WARMED, SURVIVOR, FORMED, COMPOSED)
SOUND = "all stored"
SABOTAGES = (SOUND, "another chunk's patch", "not turned", "blind")
"""Ways to serve again, when all of a turn's chunks are stored, what the arm `FORMED` answered."""

POLICY = ReusePolicy(certified=False, tolerance=None)


@dataclass
class Ran:
    """What an engine ran: forwards, their tokens, pictures encoded."""

    forwards: int = 0
    tokens: int = 0
    encodes: int = 0

    def since(self, before: Ran) -> dict[str, int]:
        return {name: value - vars(before)[name] for name, value in vars(self).items()}

    def copy(self) -> Ran:
        return Ran(**vars(self))


def counted(llm: Any) -> Ran:
    """Counts of an engine from now on, taken from what its scheduler hands to the model."""
    scheduler, ran = scheduler_of(llm), Ran()
    schedule: Callable[..., Any] = scheduler.schedule

    def counting(*given: Any) -> Any:
        step = schedule(*given)
        ran.forwards += step.total_num_scheduled_tokens > 0
        ran.tokens += step.total_num_scheduled_tokens
        ran.encodes += sum(map(len, step.scheduled_encoder_inputs.values()))
        return step

    scheduler.schedule = counting
    return ran


class Clock:
    """Seconds since it was made: of the wall, and of the processor for this whole process."""

    def __init__(self) -> None:
        self._wall, self._own = time.perf_counter(), time.process_time()

    def read(self) -> dict[str, float]:
        """The seconds so far."""
        return {"wall": time.perf_counter() - self._wall, "processor": time.process_time() - self._own}


class _Timed:
    """A client that says how long the engine took, from a prompt to its answer of one token."""

    def __init__(self, inner: Offline) -> None:
        self._inner = inner
        self.taken = Clock().read()

    def stream(self, prompt: EnginePrompt) -> Iterator[EngineCompletion]:
        clock = Clock()
        done = list(self._inner.stream(prompt))
        self.taken = clock.read()
        yield from done


class Arm:
    """A way to serve a stream of pictures of which ``keep`` stay in view, in an engine of its own."""

    def __init__(self, name: str, family: str, keep: int) -> None:
        self.name, self._keep = name, keep
        folder = Path(tempfile.mkdtemp(prefix="kamera-session-"))
        model, where = pictures_directory(folder / "model", family), folder / "store"
        pages = {"num_gpu_blocks_override": 1024, "disable_log_stats": True, **PICTURES}
        pages |= {"limit_mm_per_prompt": {"image": keep, "video": 0}}
        plain = name in (PREFIX, WARMED)
        self._llm = start(model, None if plain else where, {"harvest": "256MiB"}, **pages)
        self._ran = counted(self._llm)
        self._backbone = Backbone.from_pretrained(model, dtype="float32", by_files=True).engine
        self._store = ChunkStore.open(where)
        self._engine = _Timed(Offline(self._llm, self._backbone.builder.vision_tokens))
        self.begin()

    def begin(self) -> None:
        """Open an empty window."""
        self._window, self._terms = self._opened(), self._opened()

    def answer(self, turn: Turn) -> dict[str, Any]:
        """A picture comes, the oldest leaves for it, a question is answered with one token."""
        window, before = self._window, self._ran.copy()
        clock = Clock()
        if len(window.slots) == self._keep:
            window.slide()
        window.append(turn.frame.content)
        answer = window.generate(turn.text, 1)
        whole = clock.read()
        return {
            **self._ran.since(before),
            "engine": self._engine.taken,
            "whole": whole,
            "prompt": answer.supplied + answer.computed,
            "right": answer.text == turn.answer,
            "bound": turn.bound,
            "origins": [slot.origin for slot in answer.slots],
        }

    def later(self, turn: Turn) -> dict[str, Any]:
        """What no answer waits for."""
        window, before, clock = self._window, self._ran.copy(), Clock()
        if self.name in (SURVIVOR, FORMED, COMPOSED):
            window.keep()
            self._idle()
            window.look()
            assert all(slot.origin != "computed" for slot in window.slots), window.slots
        full = len(window.slots) == self._keep
        if self.name in (WARMED, FORMED) and full:
            window.anticipate()
        if self.name == COMPOSED:
            self._compose(turn, full)
        self._idle()
        return {**self._ran.since(before), "whole": clock.read()}

    def sabotaged(self, turn: Turn) -> dict[str, bool]:
        """Whether the turn's answer is right under each of `SABOTAGES`."""
        return {name: self.asked(turn.text, name) == turn.answer for name in SABOTAGES}

    def show(self, contents: Sequence[Any]) -> None:
        """Open a window of these pictures whose chunks, once this returns, are all stored."""
        self.begin()
        for content in contents:
            self._window.append(content)
        self._window.generate("?", 1)
        self._window.keep()
        self._idle()

    def asked(self, question: str, sabotage: str) -> str:
        """The answer over the window from the store, under one of `SABOTAGES`."""
        self._llm.reset_prefix_cache()
        with _serving(sabotage):
            answer = self._window.generate(question, 1)
        self._llm.reset_prefix_cache()
        assert all(slot.origin != "computed" for slot in answer.slots)
        return answer.text

    def computed(self, contents: Sequence[Any], question: str) -> str:
        """The answer over these pictures by an engine that has to compute all of them."""
        window = self._opened(ChunkStore.open("memory://"))
        for content in contents:
            window.append(content)
        self._llm.reset_prefix_cache()
        answer = window.generate(question, 1)
        assert answer.supplied == 0
        return answer.text

    # -- inside --------------------------------------------------------------------------------

    def _opened(self, store: ChunkStore | None = None) -> EngineWindow:
        kept = self._store if store is None else store
        return EngineWindow(
            self._engine, self._backbone, kept, fingerprint=self._backbone.fingerprint, policy=POLICY
        )

    def _idle(self) -> None:
        """Wait until what was read back is stored, so that no other arm's turn runs beside it."""
        if self.name in (PREFIX, WARMED):
            return
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        harvester = get_kv_transfer_group()._threads
        while harvester._bytes:
            time.sleep(0.02)

    def _compose(self, turn: Turn, full: bool) -> None:
        named = [slot.chunk_id for slot in self._window.slots]
        *before, last = named[1:] if full else named
        self._terms.append(turn.frame.content)
        self._terms.slide()
        form_terms(self._terms, before, last)
        context = self._window.recipe().context
        put_composed(self._store, context, [*before, last], self._backbone.layout, POLICY.budget)


@contextmanager
def _serving(sabotage: str) -> Iterator[None]:
    """The worker's operator, sabotaged."""
    worker: Any = importlib.import_module("kamera.engines.vllm.worker")
    serve, last = worker.serve, list[Any]()

    def broken(room: Any, kv: Any, patch: Any, layout: Any, offset: Any) -> None:
        shown = None if sabotage == "blind" else patch
        if sabotage == "another chunk's patch" and patch is not None:
            same = [other for other in last if other.num_tokens == patch.num_tokens]
            shown = same[-1] if same else None
            last.append(patch)
        turn = tuple(0 for _ in offset) if sabotage == "not turned" else offset
        serve(room, kv, shown, layout, turn)

    worker.serve = broken if sabotage != SOUND else serve
    try:
        yield
    finally:
        worker.serve = serve


def run_arm(pipe: Any, name: str, family: str, keep: int) -> None:
    """An arm in a process: it carries out names of its methods with their arguments until it gets None."""
    arm = Arm(name, family, keep)
    pipe.send(name)
    while (asked := pipe.recv()) is not None:
        what, *given = asked
        pipe.send(getattr(arm, what)(*given))
