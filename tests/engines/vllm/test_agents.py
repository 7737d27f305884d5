"""Agents of text that forget: what vLLM runs of their prompts, and that it shows what their recipes say."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: constraints-vllm.txt")

from benchmarks.price.clients import Messages, drop_pages, replace_pages
from benchmarks.vllm.agents import Heard, divergence, idle
from benchmarks.vllm.arm import counted
from kamera import Backbone, ChatSession, ChunkStore
from kamera.engines import LiveExecutor, Recipe
from kamera.engines.hf import HfEngine
from kamera.engines.hf.smollm2 import smollm2_source
from kamera.engines.vllm.clients import Offline
from tests.engines.vllm.engine import scheduler_of, start
from tests.models.smollm2 import needs_smollm2

pytestmark = needs_smollm2

RULES = {"dropped": drop_pages, "replaced": replace_pages}
SPARE = 12
"""Tokens of a step that are run again: what opens the answer, and what shares a page with it."""


class Bed(NamedTuple):
    """An engine that harvests and recognises, what it ran and said, and the model on the same files."""

    llm: Any
    heard: Heard
    ran: Any
    backbone: HfEngine
    where: Path

    def ids(self, messages: Messages) -> list[int]:
        template = self.backbone.processor.apply_chat_template
        return template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]

    def new(self, messages: Messages) -> int:
        """Tokens of messages that come in one step."""
        opened = [{"role": "system", "content": ""}]
        template = self.backbone.processor.apply_chat_template
        both = [template([*opened, *m], return_dict=True)["input_ids"] for m in (messages, [])]
        return len(both[0]) - len(both[1])

    def shown(self, recipe: Recipe, rest: list[int], tenant: str = "") -> dict[int, float]:
        """What is likely behind a recipe and the ``rest`` of its prompt, as the model says."""
        assert recipe.missing == ()
        executor = LiveExecutor(self.backbone, ChunkStore.open(self.where, tenant=tenant))
        executor.show(recipe)
        text, at = torch.tensor(rest), len(recipe.ids)
        (logits,) = self.backbone.ask([text], at + torch.arange(len(rest))[None], executor.live)
        found = logits[0].float().log_softmax(-1)
        return {token: float(found[token]) for token in self.heard.likeliest}


@pytest.fixture(scope="module")
def bed(tmp_path_factory):
    where, source = tmp_path_factory.mktemp("store"), smollm2_source()
    options = {"harvest": "256MiB", "recognise": "survivor"}
    llm = start(Path(source), where, options, num_gpu_blocks_override=256)
    backbone = Backbone.from_pretrained(source, dtype="float32", by_files=True).engine
    return Bed(llm, Heard(llm), counted(llm), backbone, where)


def steps(rule: str, name: str) -> list[tuple[Messages, Messages]]:
    """Requests of an agent that reads pages, each with the messages that it adds."""
    full: Messages = [
        {"role": "system", "content": "You browse pages and take notes."},
        {"role": "user", "content": f"Read the pages of {name} one by one. After each, say what is new."},
    ]
    made = []
    for i, town in enumerate(("Paris", "Lima", "Oslo", "Cairo", "Quito", "Delhi"), 1):
        before = RULES[rule](list(full))
        facts = f"Page {i}: {name} lived in {town} for {i + 1} years, and moved there by train."
        full.append({"role": "assistant", "content": f"Open page {i}."})
        full.append({"role": "user", "content": facts})
        sent = RULES[rule](list(full))
        same = [m for m in sent if m in before]
        placeholders = [m for m in sent if m["content"] == "(removed)"]
        added = [m for m in sent if m not in same] + placeholders[:1]
        made.append((sent, added if i > 1 else sent[1:]))
    return made


@pytest.mark.parametrize("rule", RULES)
def test_a_session_runs_what_is_new_and_what_it_keeps_is_what_its_recipe_says(bed, rule):
    store = ChunkStore.open(bed.where, tenant=rule)
    session = ChatSession(bed.backbone, store, engine=Offline(bed.heard, ()), mode="amortize")
    guarantees = set()
    for number, (sent, added) in enumerate(steps(rule, rule)):
        before, system = bed.ran.tokens, bed.ids(sent[:1]) if not number else []
        turn = session.send(sent, max_new_tokens=1)
        ran, likeliest = bed.ran.tokens - before, bed.heard.likeliest
        assert ran == turn.report.prefilled <= len(system) + bed.new(added) + SPARE, (number, turn.report)
        session.flush(), idle()
        window = session.window
        guarantees |= {slot.guarantee for slot in window.look()}
        recipe = window.recipe()
        bed.heard.likeliest = likeliest
        shown = bed.shown(recipe, bed.ids(sent)[len(recipe.ids) :], rule)
        assert divergence(shown, likeliest) < 1e-7, number
    assert guarantees == {"exact", "patched", "survivor"}


def test_a_plain_client_is_recognised_and_another_tenant_is_not(bed):
    from vllm import SamplingParams

    tables = scheduler_of(bed.llm).connector.scheduler.tables

    def ask(messages: Messages, salt: str) -> int:
        given, before = {"prompt_token_ids": bed.ids(messages), "cache_salt": salt}, bed.ran.tokens
        sampling = SamplingParams(temperature=0.0, max_tokens=1)
        bed.heard.generate([given], sampling, use_tqdm=False)  # at once: what the last one left is waited for
        return bed.ran.tokens - before

    guarantees = set()
    for number, (sent, added) in enumerate(steps("dropped", "Anna")):
        ids, system = bed.ids(sent), bed.ids(sent[:1]) if not number else []
        assert ask(sent, "plain") <= len(system) + bed.new(added) + SPARE
        while (known := tables.of("plain")) is None:
            time.sleep(0.01)
        if number > 3:
            recipe = known.recipe(bed.backbone.fingerprint, torch.tensor(ids).numpy(), (), "survivor")
            guarantees |= {part.guarantee for part in recipe.parts}
            shown = bed.shown(recipe, ids[len(recipe.ids) :], "plain")
            assert divergence(shown, bed.heard.likeliest) < 1e-7
    assert {"exact", "survivor"} <= guarantees <= {"exact", "patched", "survivor"}
    assert ask(sent, "another") == len(ids)
