"""The probe forward: what no digest sees shows in what the model answers, and is refused by name."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from PIL import Image

from kamera import ChunkStore, KameraWindow, ReusePolicy
from kamera.engines.hf import HfEngine
from kamera.errors import ComputationChanged
from kamera.patches import Worth, identity, later_of
from kamera.store import Context, StoreAdmin, probe_text
from kamera.store.probes import compare
from kamera.window import Append, expect, former_of
from tests.engines import changes
from tests.models import processors, samples, tiny
from tests.window.rig import QUESTION, inventory, make, same_bits, watching

FAMILY = "qwen2_5_vl"
SECRET = b"a secret of 32 bytes, or nearly."
EVERY = 8
"""Operations from one probe to the next, in tests that are `often` asked."""

often = pytest.mark.usefixtures("often")


@pytest.fixture(name="often")
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "EVERY", EVERY)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch):
    """Makes a kernel of the library compute something else, under the library's name and file."""
    return changes.broken_kernel(monkeypatch, "silu")


def opened(kind: str, folder):
    url = "memory://" if kind == "memory" else folder / "store"
    secret = {"secret": SECRET, "keys": [b"k" * 32]} if kind == "encrypted" else {}
    return ChunkStore.open(url, **secret)


@pytest.mark.parametrize("kind", ["memory", "directory", "encrypted"])
def test_a_store_refuses_a_model_that_answers_otherwise(kind, tmp_path, broken):
    first = HfEngine(tiny.build(FAMILY))
    chunk = samples.chunk(first, samples.sample(FAMILY))
    store = opened(kind, tmp_path)
    make(first, store, chunk)
    if kind != "memory":
        store.close()
        store = opened(kind, tmp_path)
    broken()
    other = HfEngine(tiny.build(FAMILY))
    assert other.fingerprint == first.fingerprint
    held = inventory(store)
    with pytest.raises(ComputationChanged, match=r"answers the text probe otherwise.*another store"):
        make(other, store)
    assert inventory(store) == held
    make(other, ChunkStore.open("memory://"), chunk)


def test_a_suspicious_step_is_noticed_and_undoing_it_resumes(monkeypatch):
    plain = torch.nn.functional.silu
    broken = changes.broken_kernel(monkeypatch, "silu")
    backbone = HfEngine(tiny.build(FAMILY))
    chunks = [samples.chunk(backbone, samples.sample(FAMILY, seed)) for seed in (1, 2)]
    window = make(backbone, None, chunks[0])
    window.flush()  # the model has been asked
    whole = torch.nn.functional.silu
    broken()
    # weights are loaded again, the same ones: the fingerprint is what it was
    backbone.model.load_state_dict(backbone.model.state_dict())
    slots = window.slots
    with pytest.raises(ComputationChanged):
        window.append(chunks[1])
    assert window.slots == slots
    torch.nn.functional.silu = whole
    assert window.append(chunks[1]).slot.guarantee == "exact"
    monkeypatch.undo()
    assert torch.nn.functional.silu is plain


@contextmanager
def busy(backbone: HfEngine) -> Iterator[None]:
    """Later work of a backbone comes to nothing more inside."""
    queue, began, over = later_of(backbone), threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        over.wait(60)

    queue.add(work)
    assert began.wait(60)
    try:
        yield
    finally:
        over.set()
        queue.flush()


def test_every_new_window_asks_the_probe_later_and_an_operation_counts_none_of_it():
    backbone = HfEngine(tiny.build(FAMILY))
    store = ChunkStore.open("memory://")
    with watching(backbone, probes=True) as seen, backbone.measure() as work:
        with busy(backbone):
            first = make(backbone, store)
            assert seen.forwards == 1, "the anchor"
        assert seen.forwards == 3, "and a text, and the question about it"
        with busy(backbone):
            second = make(backbone, store)
            second.fork()
            assert seen.forwards == 3, "the anchor is there, and so are the first answers"
        assert seen.forwards == 5, "a fork is no new window"
    assert (work.forwards, work.vision_encodes) == (1, 0)
    assert [w.usage().now.forwards for w in (first, second)] == [1, 0]
    assert [w.usage().later.forwards for w in (first, second)] == [2, 2]


def test_an_anchor_that_is_not_stored_yet_is_shared():
    backbone = HfEngine(tiny.build(FAMILY))
    store = ChunkStore.open("memory://")
    with busy(backbone), backbone.measure() as work:
        first, second = make(backbone, store), make(backbone, store)
        assert store.ls("anchor") == []
        assert former_of(first).anchor.kv is former_of(second).anchor.kv
    assert work.forwards == 1 and len(store.ls("anchor")) == 1


def test_nothing_is_kept_before_the_model_was_asked(tmp_path):
    """A window that stores at once asks at once; answers are in the header of all that it stores."""
    backbone = HfEngine(tiny.build(FAMILY))
    with ChunkStore.open(tmp_path / "s") as store, watching(backbone, probes=True) as seen:
        with busy(backbone):
            window = make(backbone, store)
            window.append(backbone.chunk_from_tensors(torch.arange(5, 9)), archive="now")
            assert seen.forwards == 4, "the anchor, the chunk (its canonical), and two of the probe"
            assert window.usage().now.forwards == 4
        answers = {
            str(store.get_canonical(former_of(window).context, window.slots[0].chunk_id).context.probe)
        }
        assert answers == {probe_text(backbone.identity.answers(), backbone.identity.tolerance)}


@often
def test_the_probe_is_asked_again_after_a_number_of_operations():
    backbone = HfEngine(tiny.build(FAMILY))
    window = make(backbone)
    with watching(backbone, probes=True) as seen:
        for _ in range(EVERY - 1):
            expect(window, QUESTION)
        later_of(backbone).flush()
        assert seen.forwards == 0
        now = window.usage().now.forwards
        expect(window, QUESTION)
        later_of(backbone).flush()
        assert (seen.forwards, window.usage().now.forwards) == (2, now)


@often
def test_an_operation_asks_if_later_work_has_not_come_to_it():
    backbone = HfEngine(tiny.build(FAMILY))
    window = make(backbone)
    with watching(backbone, probes=True) as seen, busy(backbone):
        for _ in range(2 * EVERY - 1):
            expect(window, QUESTION)
        assert seen.forwards == 0
        expect(window, QUESTION)
        assert seen.forwards == 2
        for _ in range(EVERY):
            expect(window, QUESTION)
        assert seen.forwards == 2


@often
def test_an_operation_asks_if_the_question_was_dropped():
    backbone = HfEngine(tiny.build(FAMILY))
    window = make(backbone)
    window.flush()
    queue = later_of(backbone)
    with watching(backbone, probes=True) as seen, busy(backbone):
        for _ in range(EVERY):
            expect(window, QUESTION)
        queue.limit = 1
        queue.add(lambda: None, Worth.PROBE, [torch.zeros(8)])
        assert seen.forwards == 0
        expect(window, QUESTION)
        assert seen.forwards == 2
        expect(window, QUESTION)
        assert seen.forwards == 2


@often
def test_plans_are_no_occasion_for_a_probe():
    backbone = HfEngine(tiny.build(FAMILY))
    window = make(backbone)
    with watching(backbone, probes=True) as seen:
        for _ in range(2 * EVERY):
            window.plan(Append(backbone.chunk_from_tensors(torch.arange(5, 9))))
        window.flush()
        assert seen.forwards == 0
        for _ in range(EVERY):
            expect(window, QUESTION)
        window.flush()
        assert seen.forwards == 2


def test_what_an_operation_leaves_for_later_runs_under_its_autocast(tmp_path):
    backbone = HfEngine(tiny.build(FAMILY))
    chunks = [backbone.chunk_from_tensors(torch.arange(start, start + 6)) for start in (20, 30)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        chunks = [backbone.chunk_from_tensors(chunk.input_ids) for chunk in chunks]
        store = ChunkStore.open(tmp_path / "s")
        window = make(backbone, store, *chunks, policy=ReusePolicy.exact())
        window.slide()  # the canonical of the second is made later
        window.slide()
        window.flush()
        kept = store.get_canonical(former_of(window).context, chunks[1].id)
        true = make(backbone, None, chunks[1], policy=ReusePolicy.exact())
        assert same_bits(kept.kv, true._state.residents[0].copy.kv)


def test_a_backbone_with_a_processor_is_shown_a_picture():
    answers = HfEngine(processors.matching_model(), processors.picture_processor()).identity.answers()
    assert set(answers) == {"picture", "features"}
    model = processors.matching_model()
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if "patch" in n).mul_(-1)
    other = HfEngine(model, processors.picture_processor()).identity.answers()
    assert other["picture"] != answers["picture"]
    assert other["features"] != answers["features"]


def test_another_machines_rounding_is_no_other_model():
    answers = tiny.backbone(FAMILY).identity.answers()
    rounded = {name: [x * (1 + 1e-4) for x in said] for name, said in answers.items()}
    wrong = {name: [float("nan")] * len(said) for name, said in answers.items()}
    tolerance = tiny.backbone(FAMILY).identity.tolerance
    compare(probe_text(answers, tolerance), probe_text(rounded, tolerance), "a canonical")
    for other in (wrong, {name: said[1:] for name, said in answers.items()}):
        with pytest.raises(
            ComputationChanged, match="a canonical was computed by a model of this fingerprint"
        ):
            compare(probe_text(answers, tolerance), probe_text(other, tolerance), "a canonical")
    with pytest.raises(ComputationChanged, match="does not say what the model that computed it answers"):
        compare(probe_text(answers, tolerance), "", "a canonical")


@pytest.mark.parametrize("probe", ["text", "x text=AAAA", "5e-03 text=AAA", "5e-03 text=", "5e-03"])
def test_answers_that_are_none_are_no_context(probe):
    with pytest.raises(ValueError, match=r"could not convert|padding|no answers|without answers"):
        Context("f", "a", probe=probe)


@pytest.fixture(params=["remote", "copy", "cache"])
def travelled(request, tmp_path):
    """Puts what a store has into another one, on another machine: a function from backbone and chunk."""

    def travel(backbone: HfEngine, chunk) -> ChunkStore:
        remote = f"obstore+file://{tmp_path}/remote"
        if request.param == "copy":
            with ChunkStore.open(tmp_path / "one") as store:
                make(backbone, store, chunk).flush()
                StoreAdmin(store).copy(tmp_path / "two")
            return ChunkStore.open(tmp_path / "two")
        with ChunkStore.open(remote) as store:
            make(backbone, store, chunk).flush()
        return ChunkStore.open(remote, cache=tmp_path / "cache" if request.param == "cache" else None)

    return travel


def test_answers_travel_with_objects_and_are_compared_before_the_first_serve(travelled, broken):
    first = HfEngine(tiny.build(FAMILY))
    chunk = samples.chunk(first, samples.sample(FAMILY))
    with travelled(first, chunk) as there:
        same = HfEngine(tiny.build(FAMILY))
        assert make(same, there).append(chunk).forwards == 0
        broken()
        other = HfEngine(tiny.build(FAMILY))
        assert other.fingerprint == first.fingerprint
        with pytest.raises(ComputationChanged, match="answers the text probe otherwise"):
            make(other, there)
        # under another system prompt nothing is shared but what pictures look like to the tower
        window = KameraWindow(other, there, torch.tensor([9, 9, 9]), policy=ReusePolicy.exact())
        assert window.append(chunk).slot.guarantee == "exact"


def test_a_tower_that_encodes_otherwise_is_refused_by_its_features(monkeypatch, tmp_path):
    broken = changes.broken_kernel(monkeypatch, "gelu")  # the projector's, and nobody else's
    store = ChunkStore.open(tmp_path / "s")
    first = HfEngine(processors.matching_model(), processors.picture_processor())
    square = Image.new("RGB", (56, 56), (200, 30, 90))
    window = KameraWindow(first, store, "one")
    window.append(square)
    window.flush()
    broken()
    other = HfEngine(processors.matching_model(), processors.picture_processor())
    assert other.identity.vision() == first.identity.vision()
    window = KameraWindow(other, store, "two")  # another prompt: nothing but the encoding could be shared
    with pytest.raises(ComputationChanged, match="answers the features probe otherwise"):
        window.append(square)
