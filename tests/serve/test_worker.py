"""Who runs next: several requests at once, tenants in turn, and answers that share the model's forwards."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from kamera.engines.hf import steps
from kamera.serve.worker import Job, Worker
from tests.models.hooks import hooked
from tests.serve.rig import KEY, OTHER, SYSTEM, backbone, plain, said, serving, user


@dataclass(eq=False)
class Held(Job[str]):
    """Work that notes when it begins, and ends when it may."""

    name: str
    begun: list[str]
    may_end: threading.Event

    def work(self) -> str:
        self.begun.append(self.name)
        assert self.may_end.wait(60)
        return self.name


def eventually(true: Callable[[], Any]) -> None:
    until = time.monotonic() + 60
    while not true():
        assert time.monotonic() < until
        time.sleep(0.002)


def ordered(worker: Worker, names: list[str]) -> list[str]:
    """The order in which jobs begin that are submitted one after another, each held until the next began."""

    async def held() -> list[str]:
        begun, ends = list[str](), {name: threading.Event() for name in names}
        jobs = {name: Held(name, begun, ends[name]) for name in names}
        for name in names:
            worker.submit(name[0], jobs[name])
            await asyncio.sleep(0.02)
        for i in range(len(names)):
            await asyncio.to_thread(eventually, lambda: len(begun) > i)  # noqa: B023
            ends[begun[i]].set()
        return begun

    try:
        return asyncio.run(held())
    finally:
        worker.close()


def test_the_next_job_is_of_the_tenant_of_whom_the_fewest_run():
    # a1 and a2 run, the third place is another tenant's: b1 takes it at once
    names = ["a1", "a2", "a3", "a4", "b1", "b2"]
    begun = ordered(Worker(8, at_once=3), names)
    assert begun[:3] == ["a1", "a2", "b1"]
    assert begun[3] == "b2" or begun.index("b2") < begun.index("a4")


# -- on the model ------------------------------------------------------------------------------------

CHAT = "/v1/chat/completions"


def rows_of(seen: list[int]) -> Any:
    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        tokens = kwargs.get("input_ids")
        tokens = kwargs["inputs_embeds"] if tokens is None else tokens
        if tokens.shape[1] == 1:
            seen.append(tokens.shape[0])

    return hooked(backbone(), (backbone().decoder.register_forward_pre_hook, note), with_kwargs=True)


def test_two_tenants_at_once_are_answered_in_shared_forwards_as_each_alone(monkeypatch):
    monkeypatch.setattr(steps, "_LEAST", 1.0)
    assert not backbone().steps.why_serial
    asked = [[SYSTEM, user(f"value of tag {n}?")] for n in range(3)]
    want = [said(messages, tokens=8) for messages in asked]
    rows: list[int] = []
    with serving(keys={KEY: "one", OTHER: "other"}) as served, rows_of(rows):

        def ask(number: int) -> str:
            body = {"model": "testbed", "max_tokens": 8, "temperature": 0, "messages": asked[number % 3]}
            headers = {"authorization": f"Bearer {KEY if number % 2 else OTHER}"}
            answer = plain().post(served.url + CHAT, json=body, headers=headers, timeout=60)
            return str(answer.json()["choices"][0]["message"]["content"])

        with ThreadPoolExecutor(6) as pool:
            found = list(pool.map(ask, range(6)))
    assert found == [want[number % 3] for number in range(6)]
    assert max(rows) > 1


def test_a_client_that_goes_away_frees_its_row_within_two_tokens(monkeypatch):
    """Its neighbour, which was in the same forwards, goes on and is answered as alone."""
    messages = [SYSTEM, user("value of tag 4?")]
    before = backbone().model.generation_config.eos_token_id
    backbone().model.generation_config.eos_token_id = None
    rows: list[int] = []
    try:
        want = said(messages, tokens=40)
        with serving() as served, rows_of(rows):
            body = {"model": "testbed", "temperature": 0, "messages": messages, "stream": True}
            answers: list[str] = []

            def stay() -> None:
                asked = {**body, "stream": False, "max_tokens": 40}
                answers.append(served.post(CHAT, asked).json()["choices"][0]["message"]["content"])

            with httpx.stream(
                "POST", served.url + CHAT, json={**body, "max_tokens": 4000}, timeout=60
            ) as one:
                lines = one.iter_lines()
                next(lines)
                thread = threading.Thread(target=stay)
                thread.start()
                while 2 not in rows:
                    next(lines)
            thread.join()
            eventually(lambda: served.front.worker.done == 2)
            assert not backbone().steps._rows  # nobody is left
            assert served.front.service.counts()["failed"] == 1
    finally:
        backbone().model.generation_config.eos_token_id = before
    assert answers == [want]
    assert len(rows) < 400  # of 4,000 tokens
