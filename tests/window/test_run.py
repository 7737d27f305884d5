"""A plan that was shown is what runs, also out of JSON; any other plan is refused, and nothing changes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kamera import KameraWindow, ReusePolicy
from kamera.errors import KameraError, StalePlan, UnknownChunk, UnknownSlot
from kamera.window import Evict, Plan, Reorder, Slide, requests, shown_spans
from tests.engines.compare import worst
from tests.window.rig import FULL_RANK, QUESTION, make
from tests.window.test_planned import OPERATIONS, POLICIES, asked, pieces


def facts(window: KameraWindow) -> list[tuple[Any, ...]]:
    """All that a window says of its slots, but their numbers."""
    return [tuple(replace(slot, number=0).__dict__.values()) for slot in window.slots]


def requested(window: KameraWindow, verb: str, *given_: Any, **options: Any) -> requests.Request:
    """The request of an operation; an insertion and a replacement are arrangements."""
    if verb not in ("insert", "replace"):
        return getattr(requests, verb.title())(*given_, **options)
    (index, chunk), here = given_, list(window.slots)
    if index + (verb == "replace") > len(here):
        raise ValueError(index) if verb == "insert" else UnknownSlot(index)
    here[index : index + (verb == "replace")] = [chunk]
    return requests.Arrange(here, operation=verb, **options)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(operations=st.lists(OPERATIONS, min_size=3, max_size=8), written=st.booleans())
def test_a_plan_that_is_run_leaves_what_its_operation_leaves(name, operations, written):
    """Two windows, each on a store of its own: one operates, the other plans and runs the plan."""
    backbone, chunks = pieces()
    here, there = (make(backbone, None, policy=POLICIES[name], max_tokens=50) for _ in range(2))
    for operation in operations:
        verb, given_, options = asked(here, chunks, operation)
        here.flush(), there.flush()
        try:
            plan = there.plan(requested(there, verb, *given_, **options))
        except (KameraError, ValueError, IndexError) as error:
            with pytest.raises(type(error)):
                getattr(here, verb)(*given_, **options)
            continue
        report = getattr(here, verb)(*given_, **options)
        same = Plan.from_json(plan.to_json()) if written else plan
        done = there.run(same, chunks=chunks)
        assert facts(there) == facts(here)
        assert (done.operation, done.forwards, done.tokens_recomputed, done.notes) == (
            report.operation,
            report.forwards,
            report.tokens_recomputed,
            report.notes,
        )
    for i in range(len(here)):
        assert worst(shown_spans(here)[i + 1].kv, shown_spans(there)[i + 1].kv) == 0.0
    asks = torch.equal(here.next_token_logits(QUESTION), there.next_token_logits(QUESTION))
    assert asks


def leaves(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values in a document that are no list and no object."""
    if isinstance(document, dict | list):
        items = document.items() if isinstance(document, dict) else enumerate(document)
        for key, value in items:
            yield from leaves(value, (*path, key))
    else:
        yield path


def changed(document: Any, path: tuple[Any, ...]) -> Any:
    """The document with the value at ``path`` replaced by another of its type."""
    if not path:
        match document:
            case bool():
                return not document
            case int():
                return document + 7
            case float():
                return document / 2 + 0.1
            case _:
                return "exact" if document != "exact" else "survivor"
    copied = dict(document) if isinstance(document, dict) else list(document)
    copied[path[0]] = changed(document[path[0]], path[1:])
    return copied


def test_a_plan_with_any_one_value_changed_is_refused_or_does_the_same():
    """Of a written plan nothing is believed: what runs is what the window itself would do."""
    backbone, chunks = pieces()
    window = make(backbone, None, *chunks[:3], policy=ReusePolicy(rank=FULL_RANK))
    text = window.plan(Evict(1)).to_json()
    expected = window.fork()
    expected.run(Plan.from_json(text))
    document = json.loads(text)
    refused = 0
    for path in leaves(document):
        branch = window.fork()
        try:
            branch.run(Plan.from_json(json.dumps(changed(document, path))), chunks=chunks)
        except (StalePlan, UnknownChunk, ValueError):
            refused += 1
            assert facts(branch) == facts(window), path
            continue
        assert path[0] in ("cost", "later", "notes", "arrived"), path
        assert facts(branch) == facts(expected), path
    assert refused > 100


def test_a_plan_of_another_state_is_stale():
    backbone, chunks = pieces()
    window = make(backbone, None, *chunks[:3])
    slide, order = window.plan(Slide()), window.plan(Reorder([2, 0, 1]))
    window.run(order)
    before = facts(window)
    for stale in (slide, order, Plan.from_json(slide.to_json())):
        with pytest.raises(StalePlan, match="plan anew"):
            window.run(stale)
    assert facts(window) == before
    window.append(chunks[3])
    with pytest.raises(StalePlan, match="of 3 chunks; this one has 4"):
        window.run(slide)
