"""Certify a backbone: ask a probe's questions of re-prefilled, blind and patched windows, and judge."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timezone

from kamera.certify.metrics import kl
from kamera.certify.probe import PER_SCENE, PROBES, ProbeScene, Query, digest_of
from kamera.certify.verdict import Judgement, Outcome, judge
from kamera.content import Chunk
from kamera.engines.hf import Backbone
from kamera.store import ChunkStore
from kamera.window import Certificate, KameraWindow, ReusePolicy, library_versions

ITEMS = 120
"""Questions of a probe: enough for a safe verdict when two of them are lost (`verdict.MARGIN`)."""

ANSWER_TOKENS = 12
"""An answer is one word; this leaves room for "The answer is …"."""


def certify(
    backbone: Backbone,
    *,
    probe: str = "pages",
    items: int = ITEMS,
    rank: int = ReusePolicy.rank,
    patch_bytes: float | None = ReusePolicy.patch_bytes,
    model: str = "",
) -> Certificate:
    """Run a probe to its end. Raises what `run_probe` raises."""
    for step in run_probe(
        backbone, probe=probe, items=items, rank=rank, patch_bytes=patch_bytes, model=model
    ):
        if isinstance(step, Certificate):
            return step
    raise AssertionError("a probe ends with its certificate")


def run_probe(
    backbone: Backbone,
    *,
    probe: str = "pages",
    items: int = ITEMS,
    rank: int = ReusePolicy.rank,
    patch_bytes: float | None = ReusePolicy.patch_bytes,
    model: str = "",
) -> Iterator[tuple[int, int] | Certificate]:
    """Ask ``items`` questions; yields (asked, wanted), at last the certificate.

    ``rank`` and ``patch_bytes`` bound the patches, and are those of the policies the certificate will
    serve; ``model`` is a name
    for it (default: the class's). Raises ValueError for an unknown probe, ModalityNotSupported or
    ProcessorRequired for a backbone that cannot be shown a picture.
    """
    if probe not in PROBES:
        raise ValueError(f"probe {probe!r} is none of {', '.join(PROBES)}")
    if items < 1:
        raise ValueError(f"items {items} must be at least 1")
    # uncertified: whether this may be served is what is found out
    policy = ReusePolicy(rank=rank, patch_bytes=patch_bytes, certified=False)
    outcomes: list[Outcome] = []
    shown: list[ProbeScene] = []
    chances: list[float] = []
    for scene in PROBES[probe]():
        wanted = scene.queries[: items - len(outcomes)]
        shown.append(scene)
        for query, outcome in zip(wanted, _ask(backbone, scene, wanted, policy), strict=True):
            outcomes.append(outcome)
            chances.append(1.0 / len(query.options))
            yield len(outcomes), items
        if len(outcomes) == items:
            break
    chance = sum(chances) / len(chances)
    yield _certificate(
        backbone,
        judge(outcomes, chance),
        probe=probe,
        digest=digest_of(probe, shown),
        n=items,
        chance=chance,
        policy=policy,
        model=model or type(backbone.model).__name__,
    )


def _certificate(
    backbone: Backbone,
    judged: Judgement,
    *,
    probe: str,
    digest: str,
    n: int,
    chance: float,
    policy: ReusePolicy,
    model: str,
) -> Certificate:
    return Certificate(
        fingerprint=backbone.fingerprint,
        model=model,
        versions=library_versions(),
        rank=policy.rank,
        patch_bytes=policy.patch_bytes,
        probe=probe,
        probe_digest=digest,
        n=n,
        chance=chance,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **vars(judged),
    )


def _ask(
    backbone: Backbone, scene: ProbeScene, queries: tuple[Query, ...], policy: ReusePolicy
) -> Iterator[Outcome]:
    """The scene's questions: half of them once its last chunk has left and come back, the others once
    its first chunk has slid out too."""
    chunks = [backbone.chunk(content) for content in scene.contents]
    store = ChunkStore.open("memory://")
    window = KameraWindow(backbone, store, scene.system, policy=policy)
    for chunk in chunks:
        window.append(chunk)
    window.evict(len(chunks) - 1)
    window.recall(chunks[-1].id)
    half = PER_SCENE // 2
    yield from _compare(window, _prefilled(backbone, store, scene.system, chunks), queries[:half])
    if queries[half:]:
        window.slide()
        yield from _compare(window, _prefilled(backbone, store, scene.system, chunks[1:]), queries[half:])


def _prefilled(backbone: Backbone, store: ChunkStore, system: str, chunks: Sequence[Chunk]) -> KameraWindow:
    """The same chunks, each prefilled in context; only their vision encodes come from the store."""
    exact = ReusePolicy(minimum="exact", on_miss="prefill")
    window = KameraWindow(backbone, store, system, policy=exact)
    for chunk in chunks:
        window.append(chunk)
    return window


def _compare(window: KameraWindow, fresh: KameraWindow, queries: tuple[Query, ...]) -> Iterator[Outcome]:
    """The same questions of the reused chunks, of them without their conditioning, and prefilled."""
    blind = window.fork()
    for slot in blind.slots[1:]:
        blind.condition(slot, False)
    for query in queries:
        reference = fresh.next_token_logits(query.text)
        yield Outcome(
            query.answer,
            reprefill=_answer(fresh, query),
            blind=_answer(blind, query),
            patched=_answer(window, query),
            blind_kl=kl(blind.next_token_logits(query.text), reference),
            patched_kl=kl(window.next_token_logits(query.text), reference),
        )


def _answer(window: KameraWindow, query: Query) -> str:
    said = window.generate(query.text, max_new_tokens=ANSWER_TOKENS, do_sample=False)
    return query.read(str(said))
