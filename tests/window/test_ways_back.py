"""Whatever a chunk comes back through, prefilling it again is what the plain model computes.

Some families × {saved window, archive, saved session, copied store, remote}, and with ``-m slow`` every tiny
family × {saved window, remote} and one of each kind × the others: two pictures of different sizes come back
with no vision tower, are prefilled behind other company, and are held against one call of the plain model
over the whole prompt.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.reliability.redis_server import BINARY, MISSING, RedisServer
from kamera import Chunk, ChunkStore, KameraWindow, ReusePolicy
from kamera.content import media_items
from kamera.edits import Directive
from kamera.engines.hf import HfEngine
from kamera.errors import CorruptChunk
from kamera.sessions import ChatSession
from kamera.store import StoreAdmin
from kamera.trust import weakest
from kamera.window import WINDOW, Saved, former_of
from kamera.window import save as window_file
from tests.content.templates import picture
from tests.engines.compare import relative, worst
from tests.models import samples, talkers, tiny
from tests.window.rig import QUESTION, Prefilled, distance, guarantees, make, sparse, watching

ROUNDING = 1e-4
EXACT = ReusePolicy(minimum="exact", on_miss="prefill")
DEEP = "qwen3_vl of twelve feature layers"
FAMILIES = (*tiny.FAMILIES, *tiny.LIMITED, DEEP)
STACKED = ("qwen3_vl", "qwen3_vl_moe", "qwen3_omni", DEEP)
"""Families whose encoding has a list in it."""

KINDS = (
    *("qwen2_5_vl", "qwen2_5_omni", "qwen3_vl", "glm4v", "kimi_k25", "deepseek_v32", "llava_onevision"),
    *("idefics3", "gemma3", "gemma4_shared", "mistral_sliding", "dynamic_ntk", DEEP),
)
"""A family of each kind of state and of encoding: what a file or a store writes depends on no more."""

ALWAYS = ("qwen2_5_vl", "qwen3_vl", "kimi_k25", "deepseek_v32", "gemma4_shared", "mistral_sliding", DEEP)
"""Families that run without ``-m slow``."""


@functools.cache
def backbone_of(family: str) -> HfEngine:
    if family == DEEP:
        return HfEngine(deep_model())
    return sparse() if family == "deepseek_v32" else tiny.backbone(family)


@functools.cache
def talker_of(family: str) -> HfEngine:
    if family == DEEP:
        return talkers.talking(deep_model(), "qwen3_vl")
    return talkers.talking(sparse().model if family == "deepseek_v32" else tiny.build(family), family)


def deep_model() -> nn.Module:
    """A Qwen3-VL whose decoder takes features of twelve vision layers, one at each of its layers."""
    model = tiny.build("qwen3_vl")
    told = model.config.to_dict()
    told["text_config"] |= {"num_hidden_layers": 12, "layer_types": ["full_attention"] * 12}
    told["vision_config"] |= {"depth": 13, "deepstack_visual_indexes": list(range(12))}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = type(model)(type(model.config)(**told)).eval()
    tiny.randomise(made, 1)
    return made


def chunks_of(family: str) -> list[Chunk]:
    """Two pictures of different sizes where the family knows several, and text."""
    backbone, name = backbone_of(family), "qwen3_vl" if family == DEEP else family
    seen = [samples.chunk(backbone, samples.sample(name, seed, wide=seed == 2)) for seed in (1, 2)]
    return [*seen, backbone.chunk_from_tensors(samples.text_ids(5, seed=77), label="text")]


def assert_a_reprefill(window: KameraWindow, chunks: list[Chunk]) -> None:
    """Every slot is exact, and says so rightly."""
    plain = Prefilled(former_of(window).backbone, chunks)
    assert [slot.chunk_id for slot in window.slots] == [chunk.id for chunk in chunks]
    assert guarantees(window) == ["exact"] * len(chunks)
    for i in range(len(chunks)):
        assert distance(window, i, plain) <= ROUNDING, i
    assert relative(window.next_token_logits(QUESTION), plain.logits) <= ROUNDING


def assert_recalled_in_new_company(store: ChunkStore, backbone: HfEngine, chunks: list[Chunk]) -> None:
    """A new window prefills what ``store`` holds, the last chunk first, without seeing a picture."""
    window = make(backbone, store, policy=EXACT)
    with watching(backbone) as seen:
        for chunk in chunks[::-1]:
            window.recall(chunk.id)
    assert seen.encodes == 0
    assert seen.tokens >= sum(chunk.num_tokens for chunk in chunks[:-1])
    assert_a_reprefill(window, chunks[::-1])


# -- the order in which a file gives its names -----------------------------------------------------


def _as_read(names: list[str]) -> list[str]:
    return names


def _falling(names: list[str]) -> list[str]:
    return sorted(names, reverse=True)


def _rising(names: list[str]) -> list[str]:
    return sorted(names)  # 10 before 2


@pytest.fixture
def names(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A safetensors file gives its names in any order: here in the one that the test asks for."""
    load = window_file.load

    def loaded(data: bytes) -> dict[str, torch.Tensor]:
        held = load(data)
        return {name: held[name] for name in request.param(list(held))}

    monkeypatch.setattr(window_file, "load", loaded)


def in_orders(tried: Sequence[str]) -> pytest.MarkDecorator:
    """Each family against the numbers of its names, and those with a list in other orders too."""
    pairs = [(family, _falling) for family in tried]
    pairs += [(family, order) for order in (_as_read, _rising) for family in STACKED]
    cases = [
        pytest.param(family, order, id=f"{family}-{order.__name__[1:]}", marks=_by_hand(family))
        for family, order in pairs
    ]
    return pytest.mark.parametrize(("family", "names"), cases, indirect=["names"])


def _by_hand(family: str) -> Sequence[pytest.MarkDecorator]:
    return () if family in ALWAYS else (pytest.mark.slow,)


# -- a saved window --------------------------------------------------------------------------------


@pytest.mark.few(1)
@in_orders(FAMILIES)
@pytest.mark.usefixtures("names")
def test_a_loaded_window_prefills_again_as_the_plain_model(family: str, tmp_path: Path) -> None:
    backbone, chunks = backbone_of(family), chunks_of(family)
    make(backbone, None, *chunks, policy=EXACT).save(tmp_path / "w")
    store = ChunkStore.open("memory://")
    window = KameraWindow.load(tmp_path / "w", backbone, store)
    assert_a_reprefill(window, chunks)
    with watching(backbone) as seen:
        window.reorder([2, 1, 0])
    assert seen.encodes == 0 and seen.tokens >= sum(chunk.num_tokens for chunk in chunks[:-1])
    assert_a_reprefill(window, chunks[::-1])


@pytest.mark.few(2)
@in_orders(KINDS)
@pytest.mark.usefixtures("names")
def test_what_a_loaded_window_archives_is_what_a_fresh_store_holds(family: str, tmp_path: Path) -> None:
    backbone, chunks = backbone_of(family), chunks_of(family)
    make(backbone, None, *chunks, policy=EXACT).save(tmp_path / "w")
    archive, fresh = ChunkStore.open("memory://"), ChunkStore.open("memory://")
    window = KameraWindow.load(tmp_path / "w", backbone, archive)
    window.slide(len(chunks))
    window.flush()
    for chunk in chunks:
        make(backbone, fresh, chunk).flush()
        (context,) = fresh.contexts_of(chunk.id)
        got, want = archive.get_canonical(context, chunk.id), fresh.get_canonical(context, chunk.id)
        assert worst(got.kv, want.kv) <= 1e-5
        assert torch.equal(got.positions, want.positions)
        assert got.vision == want.vision
        if want.vision:
            held, made = (s.get_encoding(want.vision, chunk.id).embeds for s in (archive, fresh))
            assert held.keys() == made.keys()
            assert all(torch.equal(held[name], made[name]) for name in made)


@pytest.mark.parametrize(
    ("family", "names"), [("qwen3_vl", _falling), ("deepseek_v32", _falling)], indirect=["names"]
)
@pytest.mark.usefixtures("names")
def test_channels_of_a_loaded_window_stand_as_in_the_layout(family: str, tmp_path: Path) -> None:
    backbone, chunks = backbone_of(family), chunks_of(family)
    store = former_of(make(backbone, None, *chunks)).store
    saved = make(backbone, store, *chunks)
    saved.save(tmp_path / "w")
    window = KameraWindow.load(tmp_path / "w", backbone, store)
    assert guarantees(window) == ["exact", "patched", "patched"]
    channels = [[channel.name for channel in spec.channels] for spec in backbone.layout]
    for resident in window._state.residents:
        assert [list(layer) for layer in resident.span.kv] == channels
    for old, new in zip(saved._state.residents[1:], window._state.residents[1:], strict=True):
        assert [list(layer) for layer in new.span.patch.layers] == [
            list(layer) for layer in old.span.patch.layers
        ]


@pytest.mark.parametrize("family", STACKED)
def test_these_families_are_encoded_with_a_list(family: str) -> None:
    tensors = backbone_of(family).encode(chunks_of(family)[0]).tensors
    assert sum(name.startswith("deepstack_visual_embeds.") for name in tensors) == (
        12 if family == DEEP else 2
    )


@pytest.mark.parametrize(
    ("lost", "says"),
    [
        ("embeds/deepstack_visual_embeds.0", r"deepstack_visual_embeds\.1 is out of place"),
        ("copy/kv/0/v", "'kv/0/v'"),
        ("copy/positions", "'positions'"),
    ],
)
def test_a_window_that_lacks_a_tensor_is_refused(lost: str, says: str, tmp_path: Path) -> None:
    backbone, chunks = backbone_of("qwen3_vl"), chunks_of("qwen3_vl")
    make(backbone, None, *chunks, policy=EXACT).save(tmp_path / "w")
    document, tensors = WINDOW.read(tmp_path / "w")
    WINDOW.publish(
        tmp_path / "w", Saved(document, {k: t for k, t in tensors.items() if k != f"00001/{lost}"})
    )
    with pytest.raises(CorruptChunk, match=rf"window\.safetensors' is malformed \(\w+: .*{says}"):
        KameraWindow.load(tmp_path / "w", backbone, ChunkStore.open("memory://"))


# -- stores ----------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("family", STACKED)
def test_a_reopened_directory_gives_what_the_plain_model_computes(family: str, tmp_path: Path) -> None:
    backbone, chunks = backbone_of(family), chunks_of(family)
    with ChunkStore.open(tmp_path / "store") as store:
        for chunk in chunks:
            make(backbone, store, chunk)
    with ChunkStore.open(tmp_path / "store") as store:
        assert_recalled_in_new_company(store, backbone, chunks)


@pytest.mark.few(2)
@pytest.mark.parametrize("family", [pytest.param(family, marks=_by_hand(family)) for family in KINDS])
def test_a_copied_store_gives_what_the_plain_model_computes(family: str, tmp_path: Path) -> None:
    backbone, chunks = backbone_of(family), chunks_of(family)
    source, target = ChunkStore.open("memory://"), ChunkStore.open("memory://")
    for chunk in chunks:
        make(backbone, source, chunk)
    StoreAdmin(source).copy(tmp_path / "bundle")
    with ChunkStore.open(tmp_path / "bundle", read_only=True) as bundle:
        StoreAdmin(bundle).copy(target)
    assert_recalled_in_new_company(target, backbone, chunks)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    if BINARY is None:
        pytest.skip(MISSING)
    with RedisServer() as running:
        yield running


@pytest.mark.few(3)
@pytest.mark.parametrize("family", [pytest.param(family, marks=_by_hand(family)) for family in FAMILIES])
def test_a_remote_gives_another_machine_what_the_plain_model_computes(
    family: str, server: RedisServer
) -> None:
    backbone, chunks = backbone_of(family), chunks_of(family)
    with ChunkStore.open(server.url("timeout=60")) as one:
        for chunk in chunks:
            make(backbone, one, chunk)
    with ChunkStore.open(server.url("timeout=60")) as other:
        assert_recalled_in_new_company(other, backbone, chunks)
        assert StoreAdmin(other).stats().remote.hits >= len(chunks)


# -- sessions --------------------------------------------------------------------------------------


def plain_logits(backbone: HfEngine, messages: list[dict]) -> torch.Tensor:
    """The plain model over the whole prompt: template, processor, one forward."""
    text = backbone.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    pictures = [item["image"] for item in media_items(messages)]
    if pictures:
        made = backbone.processor(text=[text], images=[pictures])
    else:
        made = backbone.processor(text, return_tensors="pt", add_special_tokens=False)
    ids = made["input_ids"]
    with torch.no_grad():
        return backbone.model(**{**made, "attention_mask": torch.ones_like(ids)}).logits[0, -1]


def talk(sees: bool) -> list[dict]:
    """A conversation with two pictures of different sizes behind a turn that will go."""
    shown = [[{"type": "image", "image": picture(seed, width=16 * seed, height=16)}] for seed in (1, 2)]
    first, second = shown if sees else ([], [])
    return [
        {"role": "system", "content": "Look."},
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, *first]},
        {"role": "assistant", "content": "Seen."},
        {"role": "user", "content": [*second, {"type": "text", "text": "two"}]},
    ]


@pytest.mark.few(1)
@in_orders(KINDS)
@pytest.mark.usefixtures("names")
def test_a_resumed_session_forgets_as_if_the_plain_model_had_never_seen(family: str, tmp_path: Path) -> None:
    backbone = talker_of(family)
    sees = backbone.builder.takes_pixels
    chat = ChatSession(backbone, ChunkStore.open("memory://"), policy=EXACT)
    chat.send(talk(sees), max_new_tokens=2, do_sample=False, suppress_tokens=talkers.UNSPOKEN)
    chat.save(tmp_path / "s")
    again = ChatSession.load(tmp_path / "s", backbone, ChunkStore.open("memory://"))
    report = again.edit([Directive(1, 3, unit="messages", mode="forget")])
    assert report.vision_encodes == 0
    assert report.prefilled > report.left > 0
    assert weakest(slot.guarantee for slot in again.window.slots) == "exact"
    assert len(media_items(again.messages)) == (2 if sees else 0)
    assert relative(again.next_token_logits(), plain_logits(backbone, again.messages)) <= ROUNDING
