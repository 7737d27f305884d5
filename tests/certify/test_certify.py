"""`certify` measures what a plain model says it should, tells wrong builds, and its report makes a policy."""

from __future__ import annotations

import pytest
import torch
from PIL import Image
from transformers import DynamicCache

from kamera import testbed
from kamera.certify import Estimate, Losses, certify, material
from kamera.engines.hf import HfEngine
from kamera.errors import ProcessorRequired
from tests.certify.builds import PATCHES, ROTATIONS
from tests.models import processors, tiny

QUESTIONS = ("What is it?", "And who said so?")


@pytest.fixture(scope="module")
def trained():
    return HfEngine(*testbed.load())


@pytest.fixture(scope="module")
def untrained():
    return HfEngine(processors.matching_model(), processors.picture_processor())


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Few questions about a scene, and short passages."""
    monkeypatch.setattr(material, "ASKED", 3)
    monkeypatch.setattr(material, "PASSAGE", 20)


def texts(folder) -> list:
    """Two files of eight passages each."""
    paths = [folder / "one.txt", folder / "two.txt"]
    for path in paths:
        path.write_text("\n\n".join(f"{path.stem}: passage {i} says {i * i}." for i in range(8)))
    return paths


# -- the figures ---------------------------------------------------------------------------------


def plain(backbone: HfEngine, folder) -> list[tuple[float, float, float, int]]:
    """Of blind reuse by document: KL, flips, tokens that a free answer has alike, and judged tokens.

    Made by the model's own forwards, and one rotation.
    """
    model, processor = backbone.model, backbone.processor
    end, found = model.generation_config.eos_token_id, []
    for path in texts(folder):
        chunks = [f"{text}\n\n" for text in path.read_text().split("\n\n")[4:]]
        kl, flips, alike = list[torch.Tensor](), list[torch.Tensor](), list[int]()
        for question in QUESTIONS:
            parts = [{"type": "text", "text": text} for text in (*chunks, question)]
            prompt = processor.apply_chat_template(
                [{"role": "user", "content": parts}], add_generation_prompt=True, tokenize=False
            )
            pieces = [
                processor.tokenizer(text).input_ids for text in (prompt.partition(chunks[0])[0], *chunks)
            ]
            ids = processor.tokenizer(prompt).input_ids
            asked = ids[sum(map(len, pieces)) :]
            answer: list[int] = []
            while len(answer) < 24 and (not answer or answer[-1] != end):
                answer.append(int(logits(model, ids + answer)[-1].argmax()))
            count = len(answer)
            true = logits(model, ids + answer[:-1])[-count:].double()
            ours = logits(model, asked + answer[:-1], blind_cache(model, *pieces))[-count:].double()
            p, q = ours.softmax(-1), true.softmax(-1)
            kl.append((p * (p / q).log()).sum(-1))
            flips.append((p.argmax(-1) != q.argmax(-1)).double())
            said: list[int] = []
            while len(said) < count:
                said.append(int(logits(model, asked + said, blind_cache(model, *pieces))[-1].argmax()))
                if said[-1] != answer[len(said) - 1]:
                    said.pop()
                    break
            alike.append(len(said))
        means = (float(torch.cat(kl).mean()), float(torch.cat(flips).mean()), sum(alike) / len(alike))
        found.append((*means, len(torch.cat(kl))))
    return found


@torch.no_grad()
def logits(model, ids: list[int], cache: DynamicCache | None = None) -> torch.Tensor:
    """Next-token logits ``[tokens, vocabulary]``."""
    start = 0 if cache is None else cache.get_seq_length()
    places = torch.arange(start, start + len(ids)).expand(3, 1, -1)
    return model(torch.tensor([ids]), past_key_values=cache, position_ids=places, use_cache=True).logits[0]


def blind_cache(model, prefix: list[int], *chunks: list[int]) -> DynamicCache:
    """Each chunk's KV behind the prefix alone, its keys turned to its place."""
    rows = []
    at = len(prefix)
    for chunk in chunks:
        cache = DynamicCache(config=model.config)
        logits(model, prefix + chunk, cache)
        angles = (at - len(prefix)) * model.model.language_model.rotary_emb.inv_freq.double()
        cos, sin = (f(torch.cat([angles, angles])).float() for f in (torch.cos, torch.sin))
        row = []
        for layer in cache.layers:
            k, v = layer.keys[:, :, len(prefix) :], layer.values[:, :, len(prefix) :]
            half = torch.cat([-k[..., k.shape[-1] // 2 :], k[..., : k.shape[-1] // 2]], -1)
            first = at == len(prefix)
            row.append((layer.keys, layer.values) if first else (k * cos + half * sin, v))
        rows.append(row)
        at += len(chunk)
    whole = DynamicCache(config=model.config)
    for i, layer in enumerate(zip(*rows, strict=True)):
        whole.update(torch.cat([k for k, _ in layer], 2), torch.cat([v for _, v in layer], 2), i)
    return whole


def test_the_figures_are_those_of_plain_forwards(untrained, tmp_path):
    expected = plain(untrained, tmp_path)
    made = certify(untrained, texts(tmp_path), questions=QUESTIONS, documents=2, guarantees=["blind"])
    (row,) = made.rows
    assert (row.guarantee, row.departed, row.documents) == ("blind", None, 2)
    assert row.tokens == sum(count for *_, count in expected)
    for number, got in enumerate((row.kl, row.flips, row.alike)):
        one, two = (of_document[number] for of_document in expected)
        assert got.mean == pytest.approx((one + two) / 2, rel=1e-3)
        assert (got.low, got.high) == pytest.approx((min(one, two), max(one, two)), rel=1e-3)
    assert row.kl.mean > 1e-4 and row.eta.mean == 0.0


def test_a_patch_of_full_rank_loses_nothing_and_a_smaller_one_more(untrained, tmp_path):
    def patched(rank: int) -> Losses:
        files, asked = texts(tmp_path), ["patched"]
        made = certify(untrained, files, documents=1, rank=rank, patch_bytes=None, guarantees=asked)
        assert [row.guarantee for row in made.rows] == ["patched", "blind"]
        return made.rows[0]

    whole, small = patched(64), patched(1)
    assert whole.kl.mean < 1e-8 and whole.kv.mean < 1e-4 and whole.eta.mean > 0.9999
    assert small.kv.mean > 10 * whole.kv.mean and small.eta.mean < whole.eta.mean


def test_every_guarantee_has_its_rows_and_survivors_say_what_has_departed(trained):
    made = certify(trained, documents=1, guarantees=("patched", "orbit", "survivor", "near", "blind"))
    assert [row.guarantee for row in made.rows] == ["patched", "orbit", *["survivor"] * 3, "near", "blind"]
    gone = [row.departed for row in made.of("survivor")]
    assert gone == sorted(gone) and 0.2 < gone[0] < gone[-1] < 0.9
    patched, blind = made.of("patched")[0], made.of("blind")[0]
    assert patched.kl.high < 1e-3 and blind.kl.low > 1.0
    assert patched.eta.mean == pytest.approx(1 - patched.kl.mean / blind.kl.mean)
    assert all(patched.kv.mean < row.kv.mean for row in made.rows[1:])
    assert all(row.kv.mean < 0.7 * blind.kv.mean for row in made.of("survivor")), "places do not count"


# -- sabotage ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sound(trained):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(material, "ASKED", 3)
        return certify(trained, documents=2, guarantees=["patched"]).rows[0]


def apart(one: Estimate, other: Estimate) -> bool:
    return one.high < other.low or other.high < one.low


@pytest.mark.few(1)
@pytest.mark.parametrize("fault", [*ROTATIONS, *PATCHES])
def test_the_figures_of_a_wrong_build_differ_by_more_than_their_intervals(trained, sound, fault):
    with (ROTATIONS | PATCHES)[fault]():
        wrong = certify(trained, documents=2, guarantees=["patched"]).rows[0]
    assert wrong.kv.mean > sound.kv.mean and apart(wrong.kv, sound.kv)
    if fault not in ("axis h not rotated", "axis w not rotated"):  # these answers miss none
        assert wrong.kl.mean > sound.kl.mean and apart(wrong.kl, sound.kl)


# -- what is read --------------------------------------------------------------------------------


def test_documents_are_neighbours_first_and_never_end(tmp_path):
    files = [*texts(tmp_path), tmp_path / "p.png"]
    Image.new("RGB", (8, 8), "red").save(files[-1])
    read = material.own(files, ("Who?",))
    first, second, third = (next(read) for _ in range(3))
    assert [c[0]["text"] for c in first.leaving[:2]] == [f"one: passage {i} says {i}.\n\n" for i in (0, 1)]
    assert {c[0]["text"][:3] for c in (*second.leaving, *second.staying)} == {"two"}
    assert first.questions == ("Who?",) and len(third.leaving) == len(third.staying) == 4
    picture = material._read(files[-1])
    assert picture[0][0]["image"].size == (8, 8)


def test_what_cannot_be_measured_is_refused_by_name(untrained, trained, tmp_path):
    with pytest.raises(ValueError, match="guarantee 'sure' is none of patched, orbit, survivor, near, blind"):
        certify(untrained, guarantees=["sure"])
    with pytest.raises(ValueError, match="documents 0"):
        certify(untrained, documents=0)
    with pytest.raises(ValueError, match="your own files"):
        certify(untrained, questions=QUESTIONS)
    with pytest.raises(ValueError, match="1 pictures and passages of text are too few: give 3"):
        (tmp_path / "a.txt").write_text("Short.")
        certify(untrained, [tmp_path / "a.txt"])
    (tmp_path / "b.bin").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"b\.bin' is neither a picture nor a text"):
        certify(untrained, [tmp_path / "b.bin"])
    with pytest.raises(ValueError, match=r"cannot be read: No such file"):
        certify(untrained, [tmp_path / "none.txt"])
    with pytest.raises(ProcessorRequired):
        certify(tiny.backbone("qwen2_5_vl"))
