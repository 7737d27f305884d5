"""Every family × every way to write a message × every way to a prompt, against transformers alone.

A cell asks a session, a pool or a window for the logits behind a history, and holds its token ids and logits
against the processor's own template method over the whole history and the plain model.
``python -m tests.content.matrix [FAMILY…]`` runs all cells and prints what differs; `covering` is a small set
in which each pair of values meets.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kamera import ChatSession, ChunkStore, KameraWindow, ReusePolicy, SessionPool
from kamera.errors import KameraError
from kamera.window import sequence_of
from tests.models import families
from tests.models.families import Messages, clip, picture, said

EXACT = ReusePolicy.exact()
TOLERANCE = 1e-4


def _text(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


SPEECH: dict[str, Callable[[], Messages]] = {
    "string": lambda: [_text("system", "You watch.\n"), _text("user", " what is\n\nit? ")],
    "parts": lambda: [
        said("user", "look:\n", "\nwhat?"),
        said("assistant", "ok"),
        said("user", "and ", "now?"),
    ],
    "tool result": lambda: [
        _text("user", "weather?"),
        _text("assistant", "I look"),
        _text("tool", "15 C, cloudy"),
        said("assistant", "cloudy"),
        said("tool", "16 C"),
        _text("user", "so?"),
    ],
    "thinking": lambda: [
        _text("user", "how many?"),
        _text("assistant", "<think>\none, two\n</think>\n\ntwo"),
        _text("user", "sure?"),
    ],
    "empty": lambda: [_text("system", ""), _text("user", "x"), _text("assistant", ""), _text("user", "y")],
    "picture first": lambda: [said("user", picture(), "what?")],
    "picture last": lambda: [said("user", "look:", picture())],
    "two pictures": lambda: [said("user", "a", picture(), picture(seed=1), "which?")],
    "one, then two": lambda: [
        said("user", picture(), "what?"),
        said("assistant", "a cat"),
        said("user", "and ", picture(seed=1), "here?"),
    ],
    "unlike pictures": lambda: [said("user", picture(), "or", picture(48, 24, 1), "?")],
    "clip": lambda: [said("user", "see", clip(), "what?")],
    "clip and picture": lambda: [said("user", "see", clip(), "and", picture(seed=3), "?")],
    "picture and clip": lambda: [said("user", picture(seed=3), "then", clip(), "?")],
}
"""Histories by how their messages are written; the last message is always a question."""

MORE: Messages = [said("assistant", "ok"), said("user", "and then?")]


class Cell(NamedTuple):
    """A family, how the history is written, and the way to its prompt."""

    family: str
    speech: str
    way: str


class Result(NamedTuple):
    """Token ids of a prompt, and logits ``[vocabulary]`` behind it, or those of some ``tokens`` alone."""

    ids: list[int] | None
    logits: torch.Tensor
    tokens: list[int] | None = None


def _session(family: str, **options: Any) -> ChatSession:
    return ChatSession(families.engine(family), ChunkStore.open("memory://"), policy=EXACT, **options)


def _result(session: ChatSession, messages: Messages) -> Result:
    logits = session.next_token_logits(messages)
    return Result(session.prompt_ids.tolist(), logits)


def _whole(family: str, messages: Messages) -> Result:
    return _result(_session(family), messages)


def _turn_by_turn(family: str, messages: Messages) -> Result:
    session = _session(family)
    for count in range(1, len(messages)):
        if messages[count - 1]["role"] in ("user", "tool"):
            session.send(messages[:count], max_new_tokens=1)
    return _result(session, messages)


def _after_edits(family: str, messages: Messages) -> Result:
    """Further turns were taken back, and the first message is as it was after it was another."""
    session = _session(family)
    session.next_token_logits([*messages, *MORE])
    session.next_token_logits([said("user", "before"), *messages[1:]] if len(messages) > 1 else [*MORE[1:]])
    return _result(session, messages)


def _loaded(family: str, messages: Messages) -> Result:
    session = _session(family)
    session.send(messages, max_new_tokens=1)
    with tempfile.TemporaryDirectory() as folder:
        session.save(Path(folder) / "session")
        engine, store = families.engine(family), ChunkStore.open("memory://")
        loaded = ChatSession.load(Path(folder) / "session", engine, store)
    return _result(loaded, messages)


def _pool(family: str, messages: Messages) -> Result:
    pool = SessionPool(families.engine(family), ChunkStore.open("memory://"), policy=EXACT)
    pool.send(messages[:1], max_new_tokens=1)
    turn = pool.send(messages, max_new_tokens=1, logprobs=8)
    assert turn.logprobs is not None
    likeliest = turn.logprobs[0][2]
    return Result(None, torch.tensor([one[1] for one in likeliest]), [one[0] for one in likeliest])


def _uncached(family: str, messages: Messages) -> Result:
    session = _session(family, uncached=True, max_tokens=1)
    turn = session.send(messages, max_new_tokens=1, logprobs=8)
    assert turn.logprobs is not None
    likeliest = turn.logprobs[0][2]
    ids = session.prompt_ids.tolist()
    return Result(ids, torch.tensor([one[1] for one in likeliest]), [one[0] for one in likeliest])


def _window(family: str, messages: Messages) -> Result:
    """The question's items but the last are a chunk in a window's open turn."""
    *chunk, last = messages[-1]["content"]
    question = last["text"]
    window = KameraWindow(families.engine(family), ChunkStore.open("memory://"), policy=EXACT)
    window.append(chunk)
    builder = families.engine(family).builder
    asked = builder.question_ids(question, builder.seams(None).tail)
    ids = torch.cat([sequence_of(window).input_ids, asked]).tolist()
    return Result(ids, window.next_token_logits(question))


WAYS: dict[str, Callable[[str, Messages], Result]] = {
    "whole history": _whole,
    "turn by turn": _turn_by_turn,
    "after edits": _after_edits,
    "loaded": _loaded,
    "pool": _pool,
    "uncached": _uncached,
    "window": _window,
}


def cells(names: Iterable[str] = ()) -> list[Cell]:
    """All cells of the families that can be built here (of those ``names``)."""
    out = list[Cell]()
    for family in names or families.present():
        for speech, way in itertools.product(SPEECH, WAYS):
            if "clip" in speech and not families.sees_clips(family):
                continue
            message, *rest = SPEECH[speech]()
            if way != "window" or (not rest and "text" in message["content"][-1]):
                out.append(Cell(family, speech, way))
    return out


def is_refused(cell: Cell) -> bool:
    """True for a cell that is to be refused by name."""
    messages = SPEECH[cell.speech]()
    drops_strings = cell.family in ("smolvlm", "idefics3", "llava_onevision")
    if drops_strings and any(isinstance(m["content"], str) and m["content"].strip() for m in messages):
        return True
    kinds = [i["type"] for m in messages for i in m["content"] if isinstance(i, dict) and i["type"] != "text"]
    numbers = {"ernie": bool(kinds), "llava_onevision": kinds.count("image") == 1}  # a lone picture is cut
    return cell.way == "window" and numbers.get(cell.family, False)


def covering(every: Sequence[Cell]) -> list[Cell]:
    """Few of the cells, in which each pair of values meets that meets in any."""

    def pairs(cell: Cell) -> set[tuple[Any, ...]]:
        return set(itertools.combinations(enumerate(cell), 2))

    open_pairs, chosen = set().union(*map(pairs, every)), list[Cell]()
    while open_pairs:
        best = max(every, key=lambda cell: len(pairs(cell) & open_pairs))
        chosen.append(best)
        open_pairs -= pairs(best)
    return chosen


@cache
def _expected(family: str, speech: str) -> tuple[list[int], torch.Tensor] | str:
    """Ids and logits of the plain model, or why it gives none."""
    engine, messages = families.engine(family), SPEECH[speech]()
    try:
        inputs = families.whole_prompt(engine.processor, messages)
        return inputs["input_ids"][0].tolist(), families.plain_logits(engine.model, inputs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def verdict(cell: Cell) -> str:
    """Of a cell: equal, "differs …", "refused …" by name, "no name …", "plain …" where transformers fails."""
    expected = _expected(cell.family, cell.speech)
    if isinstance(expected, str):
        return f"plain {expected}"
    ids, logits = expected
    messages = SPEECH[cell.speech]()
    try:
        result = WAYS[cell.way](cell.family, messages)
    except KameraError as error:
        return f"refused {type(error).__name__}: {error}"
    except Exception as error:
        return f"no name {type(error).__name__}: {error}"
    if cell.way == "window" and result.ids is not None and result.ids != ids:
        # no token goes across the edge of a chunk: the same text in other tokens
        ids, logits = _of_ids(cell, result.ids, ids)
    if result.ids is not None and result.ids != ids:
        return f"differs {len(result.ids)} ids for {len(ids)}"
    if result.tokens is not None:
        logits = torch.log_softmax(logits.double(), 0)[result.tokens]
    error = float((result.logits.double() - logits).norm() / logits.double().norm())
    return "equal" if error <= TOLERANCE else f"differs by {error:.1e}"


def _of_ids(cell: Cell, ids: list[int], expected: list[int]) -> tuple[list[int], torch.Tensor]:
    """The plain model over ``ids``, if they spell the text of the ``expected`` ones."""
    engine = families.engine(cell.family)
    processor = engine.processor
    inputs = families.whole_prompt(processor, SPEECH[cell.speech]())
    texts = ["".join(processor.tokenizer.decode(some).split()) for some in (ids, expected)]
    if texts[0] != texts[1]:  # but for white space, of which a template has more or less around pictures
        return expected, torch.zeros(1)
    for name in [name for name in inputs if name.endswith("token_type_ids")]:
        inputs[name] = torch.tensor(processor.create_mm_token_type_ids([ids]))
    inputs |= {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.int64)}
    return ids, families.plain_logits(engine.model, inputs)


def main(names: Sequence[str]) -> int:
    """Run all cells, print what is not equal and the counts; the number of cells that are wrong."""
    counts = Counter[str]()
    for cell in cells(names):
        said = verdict(cell)
        counts[said.split(" ")[0]] += 1
        if not said.startswith(("equal", "plain")):
            print(" | ".join(cell), "|", said[:200], flush=True)
    differ, unnamed = counts["differs"], counts["no"]
    print(
        f"{sum(counts.values())} cells: {counts['equal']} equal, {differ} differing, {unnamed} refused "
        f"without a name, {counts['refused']} by name, {counts['plain']} that transformers itself refuses"
    )
    return differ + unnamed


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]) > 0)
