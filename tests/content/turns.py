"""Random edited turns of sessions, each held against transformers over its whole history.

``python -m tests.content.turns 2000 [SEED]`` goes in turn through every family of `families` and through one
model under templates of several habits; histories end with any role. It prints each turn that differs, then
the counts.
"""

from __future__ import annotations

import functools
import random
import sys
from collections import Counter
from typing import Any

import torch

from kamera import ChatSession, ChunkStore, ReusePolicy
from kamera.engines.hf import HfEngine
from kamera.errors import KameraError
from tests.content import matrix
from tests.content.habits import HABITS
from tests.models import families, processors
from tests.models.families import Messages, clip, picture

_SIZES = ((32, 32), (48, 24), (24, 48), (16, 16))
_TEXTS = (
    "what?",
    " look: ",
    "\n\nso\n",
    "It is a cat.",
    "<think>\nhm\n</think>\n\nyes",
    "",
    "x" * 300,
    "15 C",
)
FORMS = {
    "shows strings alone": ("string",),
    **dict.fromkeys(("smolvlm", "idefics3", "llava_onevision"), ("parts",)),
}
"""Of templates that drop texts of the other form."""

LONGEST = 9
"""Messages of a history, at most."""


def models() -> list[str]:
    """Names of models under templates."""
    return [*families.present(), *HABITS]


@functools.cache
def engine(name: str) -> HfEngine:
    """One of `models`."""
    if name in HABITS:
        return HfEngine(processors.matching_model(), processors.picture_processor(HABITS[name]))
    return families.engine(name)


class Turns:
    """One session under random edits."""

    def __init__(self, name: str, draw: random.Random) -> None:
        self.name, self.draw, self.engine = name, draw, engine(name)
        self.session = ChatSession(self.engine, ChunkStore.open("memory://"), policy=ReusePolicy.exact())
        self.history: Messages = [{"role": "user", "content": self._content(shows=False)}]
        if draw.random() < 0.4:
            self.history.insert(0, {"role": "system", "content": self._content(shows=False)})

    def next(self) -> str:
        """Edit the history, ask behind it, and say how it went, as `matrix.verdict` does."""
        for _ in range(self.draw.choice((1, 1, 2, 3))):
            self._edit()
        try:
            inputs = families.whole_prompt(self.engine.processor, self.history)
            wanted = families.plain_logits(self.engine.model, inputs)
        except Exception as error:
            return f"plain {type(error).__name__}: {error}"
        try:
            got = self.session.next_token_logits(self.history)
            if self.draw.random() < 0.4:  # its answer is prefilled, and may leave again
                self.session.send(self.history, max_new_tokens=self.draw.choice((1, 3)))
                if self.draw.random() < 0.5:
                    self.history = self.session.messages
                    return self._compare(inputs, wanted, got, answered=True)
        except KameraError as error:
            return f"refused {type(error).__name__}: {error}"
        except Exception as error:
            return f"no name {type(error).__name__}: {error}"
        return self._compare(inputs, wanted, got)

    def _compare(
        self, inputs: dict[str, torch.Tensor], wanted: torch.Tensor, got: torch.Tensor, answered: bool = False
    ) -> str:
        ids = self.session.prompt_ids.tolist()
        if ids != inputs["input_ids"][0].tolist():
            return f"differs {len(ids)} ids for {inputs['input_ids'].shape[1]}"
        error = float((got.double() - wanted).norm() / wanted.double().norm())
        return "equal" if error <= matrix.TOLERANCE else f"differs by {error:.1e}"

    def _content(self, *, shows: bool) -> Any:
        text = self.draw.choice(_TEXTS)
        forms = FORMS.get(self.name, ("string", "parts"))
        if self.draw.choice(forms) == "string":
            return text or "x"
        parts: list[Any] = [{"type": "text", "text": text or "y"}]
        for _ in range(self.draw.choice((0, 1, 1, 2)) if shows else 0):
            size = self.draw.choice(_SIZES)
            item: Any = {"type": "image", "image": picture(*size, seed=self.draw.randrange(6))}
            if families.sees_clips(self.name) if self.name not in HABITS else False:
                item = self.draw.choice((item, item, clip(seed=self.draw.randrange(2))))
            parts.insert(self.draw.randrange(len(parts) + 1), item)
        return parts

    def _message(self) -> dict[str, Any]:
        role = self.draw.choice(("user", "user", "assistant", "tool"))
        return {"role": role, "content": self._content(shows=role == "user")}

    def _edit(self) -> None:
        history, draw = self.history, self.draw
        at = draw.randrange(len(history))
        kind = draw.choice(("add", "add", "insert", "rewrite", "drop", "swap", "cut"))
        if kind == "insert":
            history.insert(at, self._message())
        elif kind == "rewrite":
            history[at] = {**history[at], "content": self._content(shows=history[at]["role"] == "user")}
        elif kind == "drop" and len(history) > 1:
            del history[at]
        elif kind == "swap" and at + 1 < len(history):
            history[at], history[at + 1] = history[at + 1], history[at]
        elif kind == "cut":
            del history[at + 1 :]
        else:
            history.append(self._message())
        del history[LONGEST:]


def main(turns: int, seed: int = 0) -> int:
    """Run so many turns, in sessions of up to 12; the number of those that are wrong."""
    draw, counts, names, ends = random.Random(seed), Counter[str](), models(), Counter[str]()
    number = 0
    while sum(counts.values()) < turns:
        name = names[number % len(names)]
        number += 1
        session = Turns(name, draw)
        for _ in range(min(12, turns - sum(counts.values()))):
            found = session.next()
            counts[found.split(" ")[0]] += 1
            ends[session.history[-1]["role"]] += 1
            if not found.startswith(("equal", "plain")):
                print(name, "|", found[:160], "|", [m["role"] for m in session.history], flush=True)
            if not found.startswith("equal"):
                break
    print(
        f"{sum(counts.values())} turns of {len(names)} models and templates in {number} sessions: "
        f"{counts['equal']} equal, {counts['differs']} differing, {counts['no']} refused without a name, "
        f"{counts['refused']} by name, {counts['plain']} that transformers itself refuses; they end with "
        f"{dict(ends)}"
    )
    return counts["differs"] + counts["no"]


if __name__ == "__main__":
    raise SystemExit(main(*map(int, sys.argv[1:])) > 0)
