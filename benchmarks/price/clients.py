"""Clients of text that edit their own histories by a rule of their own, on SmolLM2.

Two agents read pages and keep the last three; three chats, each known to a pool by an id, keep their last
exchanges, with or without a note that counts, or strip the thinking of all answers but the last. The model
says something else than the agents' clients let it have said, as their prompts dictate the next call.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks import report
from benchmarks.price.counting import Dictated, shared, watching
from benchmarks.texts import documents
from benchmarks.weights import load
from kamera import ChatSession, ChunkStore, SessionPool
from kamera.engines import engine_of
from kamera.engines.hf import HfEngine

Messages = list[dict[str, Any]]
Rule = Callable[[Messages], Messages]

KEEP = 3
"""Pages, and exchanges of a chat, that stay."""

WARM = 3
"""Turns of a chat before those that are counted as later ones."""


def rows(options: Namespace) -> Iterator[report.Row]:
    """A row for each client."""
    backbone = load("smollm2")
    engine = engine_of(backbone)
    assert isinstance(engine, HfEngine), "it is loaded by transformers"
    tokenizer = backbone.processor
    found = documents(3, lambda text: tokenizer(text)["input_ids"], passages=12, longest=200)
    passages = [passage for document in found for passage in document.passages]
    if options.turns > len(passages):
        raise SystemExit(f"--turns {options.turns}: there are {len(passages)} passages")
    for name, (full, rule, said) in clients(passages[: options.turns]).items():
        store = ChunkStore.open("memory://")
        pooled = said is None
        owner = SessionPool(backbone, store) if pooled else ChatSession(backbone, store)
        yield {"client": name, "turns": options.turns, **run(engine, owner, full, rule, said)}
        report.progress(name)


def clients(passages: list[str]) -> dict[str, tuple[Messages, Rule, str | None]]:
    """Unedited histories, what their clients make of them, and what is said instead of their answers."""
    read: Messages = [
        {"role": "system", "content": "You browse pages and take notes."},
        {"role": "user", "content": "Read the pages one by one. After each, say what is new."},
    ]
    chat: Messages = [{"role": "system", "content": "You explain, in one sentence."}]
    for i, passage in enumerate(passages, 1):
        read.append({"role": "assistant", "content": f"Open page {i}."})
        read.append({"role": "user", "content": f"Page {i}:\n{passage}"})
        first = re.split(r"(?<=\.)\s", passage)[0][:200]
        thought = f"<think>\nThe question is about {first.partition(':')[0]}. {first}\n</think>\n\n"
        chat.append({"role": "user", "content": f"What does this say?\n{first}"})
        chat.append({"role": "assistant", "content": f"{thought}It says what {first.partition(':')[0]} is."})
    return {
        "agent, old pages dropped": (read, drop_pages, "I do not know."),
        "agent, old pages replaced": (read, replace_pages, "I do not know."),
        "chat, oldest exchange dropped": (chat, _last_exchanges, None),
        "chat, a note that counts": (chat, _counted, None),
        "chat, thinking stripped": (chat, _stripped, None),
    }


def run(
    backbone: HfEngine,
    owner: ChatSession | SessionPool,
    full: Messages,
    rule: Rule,
    said: str | None,
) -> report.Row:
    """The turns of a client; background work is done before the next one. The last answer's logits are kept.

    ``new``: what a prefix cache runs for the same conversation unedited.
    """
    first, new, prefix = list[int](), list[int](), list[int]()
    held: tuple[list[int], list[int]] = ([], [])
    named: dict[str, Any] = {"session_id": "client"} if isinstance(owner, SessionPool) else {}
    prompts, total, answers = list[list[int]](), 0, 0
    sent: Messages = []
    with watching(backbone) as ran:
        asks = [i for i, message in enumerate(full) if message["role"] == "user"]
        for i in asks if said is None else asks[1:]:  # an agent's first request opens a page
            sent = rule(full[: i + 1])
            prompts = [_ids(backbone, full[: i + 1]), _ids(backbone, sent)]
            answer = _answer(backbone, said if said is not None else full[i + 1]["content"])
            dictated = Dictated(answer, ran)
            owner.send(
                sent, do_sample=False, max_new_tokens=len(answer), logits_processor=[dictated], **named
            )
            owner.flush()
            first.append(sum(dictated.first))
            run_now = [len(p) - shared(h, p) for h, p in zip(held, prompts, strict=True)]
            new.append(run_now[0])
            prefix.append(run_now[1])
            held = ([*prompts[0], *answer[:-1]], [*prompts[1], *answer[:-1]])
            total, answers = total + len(prompts[1]), answers + len(answer) - 1
        spent = sum(ran.spans)
    session = owner.session("client") if isinstance(owner, SessionPool) else owner.fork()
    logits = session.next_token_logits(sent)
    with torch.no_grad():
        plain = backbone.model(torch.tensor([prompts[1]])).logits[0, -1]
    return {
        "prompt tokens": total,
        "new": sum(new),
        "prefix cache": sum(prefix),
        "first, tokens": sum(first),
        "from the fourth turn on, of new": round(sum(first[WARM:]) / sum(new[WARM:]), 3),
        "turns over a prefix cache": sum(f > p for f, p in zip(first, prefix, strict=True)),
        "background, tokens": spent - sum(first) - answers,
        "logits, largest difference to plain": float((logits - plain).abs().max()),
    }


def _ids(backbone: HfEngine, messages: Messages) -> list[int]:
    assert backbone.processor is not None, "SmolLM2 has a tokenizer"
    template = backbone.processor.apply_chat_template
    return list(template(messages, tokenize=True, add_generation_prompt=True, return_dict=True)["input_ids"])


def _answer(backbone: HfEngine, text: str) -> list[int]:
    tokenizer = backbone.processor
    assert tokenizer is not None, "SmolLM2 has a tokenizer"
    return [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


# -- rules -----------------------------------------------------------------------------------------


def drop_pages(full: Messages) -> Messages:
    """The last pages, each with the assistant's message in front of it."""
    return [*full[:2], *full[2:][max(0, len(full) - 2 - 2 * KEEP) :]]


def replace_pages(full: Messages) -> Messages:
    """All messages; the text of older pages gives way to a placeholder."""
    old = range(3, len(full) - 2 * KEEP, 2)
    return [{**m, "content": "(removed)"} if i in old else m for i, m in enumerate(full)]


def _exchanges(full: Messages, note: Callable[[Messages], Messages]) -> Messages:
    start = max(1, len(full) - 2 * KEEP + 1)
    return [full[0], *(note(full[1:start]) if start > 1 else []), *full[start:]]


def _last_exchanges(full: Messages) -> Messages:
    return _exchanges(full, lambda gone: [])


def _counted(full: Messages) -> Messages:
    return _exchanges(
        full, lambda gone: [{"role": "user", "content": f"({len(gone)} earlier messages removed)"}]
    )


def _stripped(full: Messages) -> Messages:
    last = max((i for i, m in enumerate(full) if m["role"] == "assistant"), default=0)
    return [
        {**m, "content": m["content"].partition("</think>\n\n")[2]}
        if m["role"] == "assistant" and i < last
        else m
        for i, m in enumerate(full)
    ]
