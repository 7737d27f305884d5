"""The model behind the APIs: pools of sessions, by the least guarantee that a request accepts."""

from __future__ import annotations

import json
import secrets
import threading
from collections import defaultdict
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from kamera.content import REASONING, Conversations, Fields, Message, fits, json_object, logprob_items
from kamera.engines import Completes
from kamera.engines.hf import Backbone, HfEngine, ServedModel
from kamera.files import user_path
from kamera.serve.chat import Chat
from kamera.serve.dialect import Asked, Said
from kamera.serve.refusal import refusal_of
from kamera.serve.worker import Job, Result
from kamera.sessions import (
    Branches,
    Grammar,
    SessionMode,
    SessionPool,
    Stream,
    Turn,
    call_form,
    default_policy,
    template_of,
)
from kamera.store import ChunkStore, parse_size
from kamera.trust import Guarantee, ReusePolicy, at_least
from kamera.window.view import Lives

ANSWER = 1024
"""Tokens of an answer, at most, where neither the request nor the model says."""

SESSIONS, OPERATIONS = 64, 500
"""What a tenant's page shows: the sessions that were last used, and of each so much at a time."""


class Service:
    """One backbone for many tenants, and any number of threads. Raises the errors of `ChunkStore.open`.

    ``store`` is a directory of chunks, with the sessions in it; None keeps all in memory. ``max_bytes``
    bounds the sessions in memory. Requests for more than ``policy`` and ``mode`` serve are answered by a
    pool of their own, which serves exact KV only, and takes half of the bytes. ``reuse``,
    ``min_tokens`` and ``max_sessions`` as of `SessionPool`. Over an ``engine`` no session
    is saved or seen, and of the model a `ServedModel` is enough.
    """

    def __init__(
        self,
        backbone: Backbone | HfEngine | ServedModel,
        policy: ReusePolicy | None = None,
        *,
        mode: SessionMode = "auto",
        store: Path | None = None,
        max_bytes: int | str | None = None,
        engine: Completes | None = None,
        reuse: bool = False,
        min_tokens: int = 100,
        max_sessions: int = 64,
    ) -> None:
        store = None if store is None else user_path(store)
        self.backbone, self.store = backbone.engine, store
        self._config = backbone.model.generation_config
        policy = policy or default_policy(mode, reuse)
        self._least: Guarantee = "survivor" if mode == "amortize" else policy.minimum
        self._conversations = Conversations(self.backbone.processor, most=self.backbone.limits.trained)
        self.calls = call_form(self.backbone)
        self._shows_reasoning = REASONING in template_of(self.backbone.processor)
        self._stores: dict[str, ChunkStore] = {}
        self._lives: defaultdict[str, Lives] = defaultdict(partial(Lives, SESSIONS, OPERATIONS))
        self._branches: dict[str, Branches] = {}
        self._opening = threading.Lock()
        if store is not None:
            self._store_of("")  # a folder that is no store is refused here, before any request
        policies = {"": policy} | ({} if self._least == "exact" else {"-exact": ReusePolicy.exact()})
        share = None if max_bytes is None else max(1, parse_size(max_bytes, "max_bytes") // len(policies))
        self._pools = {
            name: SessionPool(
                self.backbone,
                self._store_of,
                policy=chosen,
                mode="auto" if name else mode,
                max_bytes=share,
                save=None if store is None or engine else store / f"sessions{name}",
                trace=None if engine else self.lives_of,
                branches=self._branches,
                engine=engine,
                reuse=reuse and not name,
                min_tokens=min_tokens,
                max_sessions=max_sessions,
            )
            for name, chosen in policies.items()
        }

    def answer(self, asked: Asked, tenant: str, stream: Stream) -> Said:
        """Answer a request; ``stream`` is told. Raises the errors of `SessionPool.send`."""
        tools, dropped = asked.tools or None, tuple[str, ...]()
        if not self._shows_reasoning and any(REASONING in message for message in asked.messages):
            asked = replace(asked, messages=[_without_thought(message) for message in asked.messages])
            dropped = (REASONING,)
        asked = self._spoken(asked)
        edit: dict[str, Any] | None = None
        if asked.anew or asked.clearing is not None:
            asked, edit = self._whole(asked, tenant)
        enough = asked.minimum is None or at_least(self._least, asked.minimum)
        options: dict[str, Any] = {"tools": tools, "stream": stream, "hint": asked.hint}
        options |= {"logprobs": asked.logprobs, "after": asked.after, "grammar": grammar_of(asked)}
        options |= {"directives": asked.directives, "mode": asked.mode, "scratch": asked.scratch}
        options |= self._options(asked)
        pool = self._pools["" if enough else "-exact"]

        def said(turn: Turn) -> Said:
            called = tools and all(fits(call, tools) for call in turn.tool_calls)  # else calls are text
            content, calls = (turn.content, turn.tool_calls) if called else (turn.text, ())
            calls = calls[:1] if asked.single else calls
            content = "" if asked.forced and calls else content  # else the beginning of one more, cut off
            some = turn.logprobs
            noted = None if some is None else logprob_items(some, content, self._conversations)
            return Said(turn, content, calls, stream.stopped, edit, noted, dropped)

        # results answer the calls in it by their ids
        options["told"] = lambda turn: self._conversations.spoken(said(turn).message)
        return said(pool.send(asked.messages, asked.session, tenant, **options))

    def delete(self, turn_id: str, tenant: str) -> None:
        """Take a turn out of its conversation. Raises UnknownTurn."""
        for pool in self._pools.values():
            pool.delete(turn_id, tenant)

    def count(self, asked: Asked, tenant: str) -> int:
        """Tokens of a request's prompt."""
        asked, _ = self._whole(self._spoken(asked), tenant)
        return self._conversations.render(asked.messages, tools=asked.tools or None).num_tokens

    def counts(self, tenant: str) -> dict[str, int]:
        """Counts of a tenant's requests in all pools since the start, and its sessions now."""
        pools = [pool.metrics(tenant) for pool in self._pools.values()]
        counted = {f.name: sum(getattr(m, f.name) for m in pools) for f in fields(pools[0])}
        return {**counted, "sessions": sum(pool.count_sessions(tenant) for pool in self._pools.values())}

    def lives_of(self, tenant: str) -> Lives:
        """What the windows of a tenant's sessions did."""
        with self._opening:
            return self._lives[tenant]

    def close(self) -> int:
        """Complete background work and saves; the number of saved sessions. Raises as `SessionPool.flush`."""
        try:
            for pool in self._pools.values():
                pool.flush()
            return sum(len(pool.list_saved(t)) for pool in self._pools.values() for t in self._stores)
        finally:
            for store in self._stores.values():
                store.close()

    def _spoken(self, asked: Asked) -> Asked:
        """A request whose texts are in the form that the model's template shows, whatever the API's is."""
        return replace(asked, messages=[*map(self._conversations.spoken, asked.messages)])

    def _store_of(self, tenant: str) -> ChunkStore:
        with self._opening:
            if tenant not in self._stores:
                self._stores[tenant] = ChunkStore.open(self.store or "memory://", tenant=tenant)
            return self._stores[tenant]

    def _whole(self, asked: Asked, tenant: str) -> tuple[Asked, dict[str, Any] | None]:
        """A request with its whole history, in place of the turn that it goes on from, after its own edit;
        and that edit."""
        messages, edit = asked.messages, None
        if asked.after is not None:
            history = self._pools[""].history(asked.after, tenant)
            head = messages[: messages[0]["role"] == "system"]
            own = history[0]["role"] == "system" and (asked.anew or bool(head))
            messages = [*head, *history[own:], *messages[len(head) :]]
        if asked.clearing is not None:
            messages, edit = asked.clearing.apply(messages, self._conversations, asked.tools or None)
        return replace(asked, messages=messages, after=None), edit

    def _options(self, asked: Asked) -> dict[str, Any]:
        """Options of ``generate``. Each request draws from a seed of its own."""
        config = self._config
        tokens = asked.max_tokens or config.max_new_tokens or ANSWER
        options = {"max_new_tokens": min(tokens, self.backbone.limits.trained or tokens)}
        default = (config.temperature or 1.0) if config.do_sample else 0.0
        temperature = default if asked.temperature is None else asked.temperature
        if temperature == 0:
            return {**options, "do_sample": False}
        drawn = {
            "temperature": temperature,
            "top_p": config.top_p if asked.top_p is None else asked.top_p,
            "top_k": config.top_k if asked.top_k is None else asked.top_k,
        }
        return {**options, **drawn, "seed": secrets.randbits(62) if asked.seed is None else asked.seed}


def grammar_of(asked: Asked) -> Grammar | None:
    """What an answer has to be: calls that its request forces, or its format, beside which calls may come."""
    if asked.forced:
        return Grammar(None, asked.forced, not asked.single)
    if asked.format is None:
        return None
    names = tuple(tool["function"]["name"] for tool in asked.tools)
    schema, at = asked.format
    return Grammar(schema, names, not asked.single, at)


def _without_thought(message: Message) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name != REASONING}


@dataclass(eq=False)
class Asking(Job[Result]):
    """A tenant's request to a service."""

    service: Service
    tenant: str
    asked: Asked


class Answer(Asking[Said], Stream):
    """A request that is to be answered; the stream of its own answer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        calls = self.service.calls if self.asked.tools else None
        Stream.__init__(self, self.asked.stop, calls, single=self.asked.single)

    def work(self) -> Said:
        """The answer; all of its content has been told then."""
        said = self.service.answer(self.asked, self.tenant, self)
        self.tell(said.content[self.told :])
        return said


class Count(Asking[int]):
    """A request that is to be counted."""

    def work(self) -> int:
        """The tokens of the prompt."""
        return self.service.count(self.asked, self.tenant)


class Within:
    """Chat completions of a service in its own process, for one tenant, one after another."""

    def __init__(self, service: Service, tenant: str = "") -> None:
        self._service, self._tenant, self._lock = service, tenant, threading.Lock()

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """A ``chat.completion`` for a request's body. Raises Refusal."""
        try:
            dialect = Chat(Fields(json_object(json.dumps(body).encode())))
            asked = dialect.asked
            calls = self._service.calls if asked.tools else None
            with self._lock:
                stream = Stream(asked.stop, calls, single=asked.single)
                return dialect.whole_answer(self._service.answer(asked, self._tenant, stream))
        except Exception as error:
            raise refusal_of(error) from error
