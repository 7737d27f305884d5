"""``python -m lab.replay.ttft``: time to the first token of each turn, under each way of caching.

An agent that keeps its last screenshots, on a published shape with few layers and random weights. The
batched arms remove them in batches of as many as there are timed turns, so one removal falls into them. The
arms take turns within each turn of the session, in changing order, so a ratio compares runs that are moments
apart. Kamera's arms run as a user's would: from messages through `ChatSession.send` to the first token, store
and template included; later work is done before the next turn. The others run as bare as they can: no
template, no store, the KV of what they kept given, the vision tower over the pictures that they lost (over
the new one alone where encodings are kept), and the rest of the prompt in one forward.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kamera import ChatSession
from kamera.content import Chunk, Conversations, Message, Rendered, Segment
from kamera.edits import apply_policy, policies
from kamera.engines.hf import HfEngine, forwards
from kamera.engines.hf.encode import decoder_arguments, with_batch
from lab.replay.counted import Reuse, imc, nothing, prefix
from lab.replay.scripts import screens
from lab.replay.shapes import enlarged, shaped
from lab.replay.ways import REPAIR, SAMPLED, WAYS
from lab.speed.content import noise_kv
from lab.speed.machine import commit, machine
from lab.speed.timing import Spread

KEPT = "prefix cache, encodings kept"
BARE: dict[str, Reuse] = {
    "no cache": nothing,
    "prefix cache": prefix,
    KEPT: prefix,
    "prefix cache, batched": prefix,
    f"{KEPT}, batched": prefix,
    "SPC + IMC": imc,
}
KAMERA = {f"Kamera {name}": way for name, way in {**WAYS, "repair": REPAIR, **SAMPLED}.items()}
ARMS = (*BARE, *KAMERA)
COMPARED = ("no cache", "prefix cache", KEPT)
Clock = tuple[float, float]
"""Seconds on the wall, and of the processor."""


class Bare:
    """Caches that keep a prefix: what they prefill of a prompt, behind KV of noise for what they kept."""

    def __init__(self, backbone: HfEngine, conversations: Conversations) -> None:
        self._backbone = backbone
        self._conversations = conversations

    def answer(
        self, messages: Sequence[Message], prompt: Rendered, kept: int, encoded: Collection[str] = ()
    ) -> Callable[[], torch.Tensor]:
        """The first logits ``[vocabulary]`` of ``prompt``, of which ``kept`` segments are cached.

        Pictures of the digests ``encoded`` are at hand, too.
        """
        backbone = self._backbone
        start = prompt.segments[kept - 1].stop if kept else 0
        media = {name: one.inputs for name, one in prompt.media.items()}
        shown = [media[s.media] for s in prompt.segments if s.media is not None]
        gone = [s for s in prompt.segments[kept:] if s.media is not None]
        lost = [media[str(s.media)] for s in gone]
        chunk = backbone.chunk_from_tensors(prompt.ids[start:], label="rest", **_taken(backbone, lost))
        whole = backbone.chunk_from_tensors(prompt.ids, label="whole", **_taken(backbone, shown))
        positions = backbone.positions([prompt.ids], [whole.position_inputs()])[:, start:]
        cache = forwards.make_cache(backbone, [noise_kv(backbone, start, seed=1)] if start else [])
        held = backbone.encode(chunk) if encoded else None
        new = [self._alone(prompt, s, media[str(s.media)]) for s in gone if s.media not in encoded]

        def run() -> torch.Tensor:
            for picture in new if held else ():
                backbone.encode(picture)
            arguments = decoder_arguments(held or backbone.encode(chunk), backbone.model.device) | {
                "position_ids": with_batch(positions).to(backbone.model.device),
                "past_key_values": cache,
                "use_cache": True,
            }
            with torch.no_grad():
                hidden = backbone.decoder(**arguments).last_hidden_state[:, -1:]
                logits: torch.Tensor = backbone.model.get_output_embeddings()(hidden)
            return logits[0, -1]

        return run

    def _alone(self, prompt: Rendered, segment: Segment, pixels: Mapping[str, torch.Tensor]) -> Chunk:
        """A picture of the prompt as a chunk of its own."""
        ids = prompt.ids[segment.start : segment.stop]
        return self._backbone.chunk_from_tensors(ids, label="picture", **_taken(self._backbone, [pixels]))


def first_tokens(
    backbone: HfEngine, keep: int, side: int, steps: int, seed: int, arms: Sequence[str] = ARMS
) -> dict[str, Any]:
    """Seconds to the first token of the last ``steps`` turns of a session, by arm.

    The turns before fill the windows and are not timed: the rule removes a picture in each that is.
    """
    before, rule = keep + 1, policies.keep_last_images(keep)
    turns = enlarged(list(screens(random.Random(seed), before + steps)), side)
    batched_rule = policies.keep_last_images(keep, batch=steps)
    conversations, rules = (
        Conversations(backbone.processor),
        dict.fromkeys((n for n in BARE if "batched" in n), batched_rule),
    )
    bare = Bare(backbone, conversations)
    shaped_to = {
        name: [apply_policy(rules.get(name, rule), m, i) for i, m in enumerate(turns)] for name in BARE
    }
    prompts = {name: [conversations.render(m) for m in held] for name, held in shaped_to.items()}
    chats = {name: way.session(backbone, rule) for name, way in KAMERA.items() if name in arms}
    for name, chat in chats.items():
        for history in turns[:before]:
            _asked(chat, history)
            KAMERA[name].between(chat)
    bare.answer(shaped_to["no cache"][0], prompts["no cache"][0], 0)()  # warms up
    spent: dict[str, list[Clock]] = {name: [] for name in arms}
    for i in range(before, len(turns)):
        order = [*arms[i % len(arms) :], *arms[: i % len(arms)]]
        for name in order:
            if name in chats:
                spent[name].append(_asked(chats[name], turns[i]))
                KAMERA[name].between(chats[name])
                continue
            old, prompt = prompts[name][i - 1], prompts[name][i]
            encoded = {s.media for s in old.segments if s.media is not None} if KEPT in name else set()
            run = bare.answer(shaped_to[name][i], prompt, BARE[name](old, prompt), encoded)
            started = _now()
            run()
            spent[name].append(_since(started))
    sizes = {name: [p.num_tokens for p in held[before:]] for name, held in prompts.items()}
    return {"prompt tokens": sizes["no cache"], "arms": {name: _told(spent, name) for name in arms}}


class _Clock:
    """A logits processor that changes nothing, and notes when it is called first."""

    def __init__(self) -> None:
        self._started = _now()
        self.spent: Clock | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """``scores`` as they are."""
        self.spent = self.spent or _since(self._started)
        return scores


def _asked(chat: ChatSession, history: Sequence[Message]) -> Clock:
    """The time of a request to the first token of its answer."""
    clock = _Clock()
    chat.send(history, max_new_tokens=1, do_sample=False, logits_processor=[clock])
    assert clock.spent is not None, "an answer has a first token"
    return clock.spent


def _now() -> Clock:
    return time.perf_counter(), time.process_time()


def _since(started: Clock) -> Clock:
    wall, own = _now()
    return wall - started[0], own - started[1]


def _taken(backbone: HfEngine, media: Sequence[Any]) -> dict[str, torch.Tensor]:
    """The pixels of several pictures as one input."""
    accepted = set(backbone.builder.accepted)
    names = [n for n in (media[0] if media else ()) if n in accepted]
    return {name: torch.cat([one[name] for one in media]) for name in names}


def _told(spent: dict[str, list[Clock]], name: str) -> dict[str, Any]:
    """An arm's seconds, and how many times those of two others it takes, turn by turn."""
    wall, own = zip(*spent[name], strict=True)
    out: dict[str, Any] = {
        "seconds": [round(t, 4) for t in wall],
        "processor seconds": [round(t, 4) for t in own],
    }
    for other in (name for name in COMPARED if name in spent):
        rounds = zip(own, (t for _, t in spent[other]), strict=True)
        of = Spread.of([mine / theirs for mine, theirs in rounds])
        total = sum(own) / sum(t for _, t in spent[other])
        out[f"of {other}"] = {
            "median": round(of.median, 4),
            "low": round(of.low, 4),
            "high": round(of.high, 4),
            "sum": round(total, 4),
        }
    return out


def table(document: dict[str, Any]) -> str:
    """The same for people, as Markdown: medians of processor seconds and of ratios, turn by turn."""
    lines = [f"`{document['command']}`, commit {document['commit']}", ""]
    for keep, results in document["results"].items():
        others = [name for name in COMPARED if name in results["arms"]]
        lines += [f"| {keep} kept | processor seconds | " + " | ".join(f"of {o}" for o in others) + " |"]
        lines += ["|---" * (2 + len(others)) + "|"]
        for name, told in results["arms"].items():
            seconds = sum(told["processor seconds"]) / len(told["processor seconds"])
            shares = " | ".join(f"{told[f'of {other}']['median']}" for other in others)
            lines.append(f"| {name} | {seconds:.2f} | {shares} |")
        lines.append("")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m lab.replay.ttft", description=__doc__)
    parser.add_argument("--preset", default="kimi-vl-a3b", help="a shape of lab.speed")
    parser.add_argument("--layers", type=int, default=2, help="of decoder and tower; 0: all")
    parser.add_argument("--keep", type=int, nargs="+", default=[3], help="screenshots that stay")
    parser.add_argument("--side", type=int, default=336, help="pixels of a screenshot's side")
    parser.add_argument("--steps", type=int, default=4, help="timed turns")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=[*ARMS], help="ways of caching")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--format", choices=("table", "json"), default="table")
    parser.add_argument("--output", type=Path, help="write there instead of to stdout")
    asked = parser.parse_args(arguments)
    if asked.steps < 1 or min(asked.keep) < 1:
        parser.error("keep one screenshot or more, and time one turn or more")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    backbone = shaped(asked.preset, asked.layers or None, torch.float32)
    words = [f"--{k} {getattr(asked, k)}" for k in ("preset", "layers", "side", "steps", "seed")]
    words += [f"--keep {' '.join(map(str, asked.keep))}"]
    words += [] if asked.arms == [*ARMS] else ["--arms", *(f'"{arm}"' for arm in asked.arms)]
    document: dict[str, Any] = {
        "command": f"python -m lab.replay.ttft {' '.join(words)}",
        "commit": commit(),
        "machine": machine(),
        "results": {},
    }
    for keep in asked.keep:
        found = first_tokens(backbone, keep, asked.side, asked.steps, asked.seed, asked.arms)
        document["results"][str(keep)] = found
        if asked.output is not None:  # a run that is ended early leaves what it found
            asked.output.write_text(_shown(document, asked.format), encoding="utf-8")
    if asked.output is None:
        print(_shown(document, asked.format), end="")
    return 0


def _shown(document: dict[str, Any], form: str) -> str:
    return (json.dumps(document, indent=1) if form == "json" else table(document)) + "\n"


if __name__ == "__main__":
    sys.exit(main())
