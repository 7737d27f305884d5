"""Two agents that forget old pages, on SmolLM2, in vLLM: tokens it ran, and how far its answers are off.

The agents of ``benchmarks.price``: each step sends the whole history, of which the last three pages stay; old
ones are dropped, or a placeholder stands for them. Counted is what an engine's scheduler handed to its model.
Far off is KL(cold ‖ served) of the answer's first token, in nats over the likeliest tokens that both tell:
cold is the same engine under a salt of its own, which finds nothing, or the plain model.
"""

from __future__ import annotations

import math
import multiprocessing
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.price.clients import Messages, clients
from benchmarks.texts import documents
from benchmarks.vllm.arm import counted
from benchmarks.vllm.bed import start
from kamera import Backbone, ChatSession, ChunkStore
from kamera.engines.hf.smollm2 import smollm2_source
from kamera.engines.vllm.clients import Offline

LIKELIEST = 20
"""Tokens whose log-probabilities an answer tells."""

PREFIX, SESSION, INSIDE = "prefix cache", "session", "session without vLLM"
RECOGNISED = ("survivor", "near")
ARMS = (PREFIX, INSIDE, SESSION, *RECOGNISED)
"""Ways to serve an agent: vLLM alone; a session that amortizes, on vLLM and on transformers; and plain
clients of an engine that recognises prompts with that guarantee at least."""

AGENTS = {"dropped": "agent, old pages dropped", "replaced": "agent, old pages replaced"}

Likeliest = Mapping[int, float]


@dataclass(frozen=True)
class Step:
    """A request that was answered: tokens of the prompt, those run for it, and in idle time; and what of it
    was likeliest first, as served and cold."""

    prompt: int
    now: int
    later: int
    served: Likeliest
    cold: Likeliest


class Heard:
    """An engine that tells the likeliest first tokens of its last answer."""

    def __init__(self, llm: Any) -> None:
        self._llm, self.llm_engine, self.likeliest = llm, llm.llm_engine, dict[int, float]()

    def generate(self, prompts: Any, sampling: Any, **options: Any) -> Any:
        """As the engine's own."""
        sampling.logprobs = LIKELIEST
        answers = self._llm.generate(prompts, sampling, **options)
        self.likeliest = {token: one.logprob for token, one in answers[-1].outputs[0].logprobs[0].items()}
        return answers


def rows(options: Namespace) -> Iterator[report.Row]:
    """A row for each agent and arm."""
    context = multiprocessing.get_context("spawn")
    for agent in AGENTS:
        for arm in options.arms or ARMS:
            with context.Pool(1) as pool:  # an engine does not give back all that it takes
                done = pool.apply(steps, (arm, agent, options.turns))
            yield {"old pages": agent, "arm": arm, **summed(done)}
            report.progress(f"{agent}, {arm}")


def summed(done: list[Step]) -> report.Row:
    """Sums over the steps."""
    far = [divergence(step.cold, step.served) for step in done]
    return {
        "steps": len(done),
        "prompt tokens": sum(step.prompt for step in done),
        "run": sum(step.now for step in done),
        "in idle time": sum(step.later for step in done),
        "KL to cold, mean": round(statistics.mean(far), 5),
        "KL to cold, largest": round(max(far), 4),
        "first token as cold": sum(likeliest(step.cold) == likeliest(step.served) for step in done),
    }


def likeliest(tokens: Likeliest) -> int:
    """The first of them."""
    return max(tokens, key=lambda token: tokens[token])


def divergence(p: Likeliest, q: Likeliest) -> float:
    """KL(p ‖ q) over the tokens that both tell, and all others as one: a lower bound."""
    both = [(math.exp(p[token]), math.exp(q[token])) for token in p if token in q]
    rest = [max(1e-9, 1 - sum(pair[i] for pair in both)) for i in range(2)]
    return max(0.0, sum(a * math.log(a / b) for a, b in [*both, (rest[0], rest[1])]))


def steps(arm: str, agent: str, turns: int) -> list[Step]:
    """An agent's steps, one way, in this process."""
    folder = Path(tempfile.mkdtemp(prefix="kamera-agents-"))
    backbone = Backbone.from_pretrained(smollm2_source(), dtype="float32", by_files=arm != INSIDE)
    tokenizer = backbone.processor
    found = documents(3, lambda text: tokenizer(text)["input_ids"], passages=12, longest=200)
    pages = [passage for document in found for passage in document.passages][:turns]
    full, rule, _ = clients(pages)[AGENTS[agent]]
    ends = [i + 1 for i, message in enumerate(full) if message["role"] == "user"][1:]
    step = inside(backbone) if arm == INSIDE else over_vllm(arm, backbone, folder)
    return [step(rule(full[:end])) for end in ends]


def inside(backbone: Backbone) -> Callable[[Messages], Step]:
    """A session on transformers, which counts what it runs before the answer."""
    session = ChatSession(backbone, ChunkStore.open("memory://"), mode="amortize")

    def step(messages: Messages) -> Step:
        turn = session.send(messages, do_sample=False, max_new_tokens=1, logprobs=LIKELIEST)
        before = session.usage().background.tokens
        session.flush()
        later = session.usage().background.tokens - before
        assert turn.logprobs is not None, "they were asked for"
        served = dict(turn.logprobs[0].likeliest)
        with torch.no_grad():
            plain = backbone.model(session.prompt_ids[None]).logits[0, -1].log_softmax(-1)
        cold = dict(zip(*(t.tolist() for t in plain.topk(LIKELIEST)[::-1]), strict=True))
        return Step(turn.usage.prompt_tokens, turn.report.prefilled, later, served, cold)

    return step


def over_vllm(arm: str, backbone: Backbone, folder: Path) -> Callable[[Messages], Step]:
    """A session over vLLM, or a plain client of it."""
    from vllm import SamplingParams

    options = {"harvest": "256MiB", **({"recognise": arm} if arm in RECOGNISED else {})}
    pages = {"max_model_len": 4096, "num_gpu_blocks_override": 2048}
    llm = start(Path(smollm2_source()), None if arm == PREFIX else folder, options, **pages)
    ran, heard, tokenizer = counted(llm), Heard(llm), backbone.processor
    engine = Offline(heard, ())
    session = (
        ChatSession(backbone, ChunkStore.open(folder), engine=engine, mode="amortize")
        if arm == SESSION
        else None
    )
    asked = list[int]()

    def ask(messages: Messages, salt: str | None = None) -> int:
        ids = tokenizer.apply_chat_template(
            messages, tokenize=True, add_generation_prompt=True, return_dict=True
        )["input_ids"]
        given: dict[str, Any] = {"prompt_token_ids": list(ids), **({"cache_salt": salt} if salt else {})}
        heard.generate([given], SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
        return len(ids)

    def step(messages: Messages) -> Step:
        before = ran.tokens
        if session is None:
            prompt = ask(messages)
        else:
            prompt = session.send(messages, max_new_tokens=1).usage.prompt_tokens
        served, now = heard.likeliest, ran.tokens - before
        if session is not None:
            session.flush()
        if arm != PREFIX:
            idle()
        later = ran.tokens - before - now
        ask(messages, f"cold {len(asked)}")
        asked.append(now)
        return Step(prompt, now, later, served, heard.likeliest)

    return step


def idle() -> None:
    """Wait until what an engine in this process computed is stored, and may be looked up again."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    while get_kv_transfer_group()._threads._bytes:
        time.sleep(0.02)
    time.sleep(0.2)
