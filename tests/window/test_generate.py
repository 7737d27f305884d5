"""Answers: what transformers' own generate gives on the concatenated prompt, and the window as it was."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from kamera import ChunkStore, KameraWindow, ReusePolicy
from kamera.engines.hf import HfEngine
from kamera.window import former_of, next_token_logits_of, sequence_of
from tests.engines.compare import relative
from tests.models import tiny
from tests.window.rig import (
    GREEDY,
    QUESTION,
    Prefilled,
    Snapshot,
    guarantees,
    is_a_reprefill,
    make,
    question_ids,
    rig,
    watching,
)

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "kimi_k25", "gemma3", "llava", "deepseek_v32", "gemma4_shared")
EXACT = ReusePolicy(minimum="exact")

OPTIONS = {
    "greedy": {"do_sample": False, "max_new_tokens": 6},
    "sampled": {"do_sample": True, "top_k": 20, "temperature": 1.5, "max_new_tokens": 6},
    "beams": {"do_sample": False, "num_beams": 3, "max_new_tokens": 5},
    "several beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 5},
    "several samples": {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 5},
    "penalty on the prompt": {"do_sample": False, "repetition_penalty": 3.0, "max_new_tokens": 6},
    "penalty on what is not in the prompt": {"encoder_repetition_penalty": 3.0, "max_new_tokens": 6},
    "no n-gram twice": {"do_sample": False, "no_repeat_ngram_size": 1, "max_new_tokens": 6},
    "no n-gram of the prompt": {"encoder_no_repeat_ngram_size": 1, "num_beams": 2, "max_new_tokens": 6},
    "a length with the prompt": {"do_sample": False, "max_length": 60, "min_length": 60},
    "as a dictionary": {"do_sample": False, "return_dict_in_generate": True, "max_new_tokens": 3},
    "all by one object": {"generation_config": GenerationConfig(num_beams=2, max_new_tokens=4)},
    "another cache": {"generation_config": GenerationConfig(cache_implementation="static", max_new_tokens=4)},
    "no cache": {"generation_config": GenerationConfig(use_cache=False, num_beams=2, max_new_tokens=4)},
}

DRAFTS = {
    "of the prompt": {"prompt_lookup_num_tokens": 3},
    "of single tokens": {"prompt_lookup_num_tokens": 8, "max_matching_ngram_size": 1},
    "of a config": {"generation_config": GenerationConfig(prompt_lookup_num_tokens=4)},
    "of another model": {"assistant_model": "llama_mqa"},
    "of the same model": {"assistant_model": "itself"},
    "of a model that sees": {"assistant_model": "qwen2_vl"},
}
"""Options that draft tokens; an assistant by its name."""


@pytest.fixture(scope="module", params=FAMILIES)
def exact(request):
    """A window of exact slots that has been rearranged, and the plain model on the same sequence."""
    backbone, chunks = rig(request.param)
    window = make(backbone, None, *chunks[:3], policy=EXACT)
    window.slide()
    return window, Prefilled(backbone, chunks[1:3])


@pytest.mark.few(2)
@pytest.mark.parametrize("case", OPTIONS)
def test_generate_gives_the_tokens_of_the_models_own_generate(exact, case):
    window, plain = exact
    options = {"pad_token_id": 0, **OPTIONS[case]}
    before = Snapshot.of(window)
    torch.manual_seed(7)
    got = window.generate(QUESTION, **options)
    torch.manual_seed(7)
    if case == "as a dictionary":
        del options["return_dict_in_generate"]
    if case == "another cache":  # of transformers' own caches not all hold every model
        options["generation_config"] = GenerationConfig(max_new_tokens=4)
    want = plain.generate(**options)
    rows = got if isinstance(got, list) else [got]
    assert len(rows) == options.get("num_return_sequences", 1)
    for row, expected in zip(rows, want, strict=True):
        assert torch.equal(row, expected)
    assert before.matches(window)


@pytest.mark.few(2)
@pytest.mark.parametrize("draws", [{"do_sample": False}, {"do_sample": True}], ids=["greedy", "drawn"])
@pytest.mark.parametrize("case", DRAFTS)
def test_drafted_tokens_change_no_answer(exact, case, draws):
    window, _ = exact
    backbone, drafts = former_of(window).backbone, dict(DRAFTS[case])
    if name := drafts.get("assistant_model"):
        drafts["assistant_model"] = backbone.model if name == "itself" else tiny.build(name)
    question = torch.cat([QUESTION, QUESTION, QUESTION[:2]])
    options = {"max_new_tokens": 9, "pad_token_id": 0, "temperature": 0.3, **draws}
    torch.manual_seed(7)
    want = window.generate(question, **options)
    torch.manual_seed(7)
    assert torch.equal(window.generate(question, **options, **drafts), want)


@pytest.mark.few(3)
def test_an_exchange_that_is_kept_becomes_a_chunk(exact):
    window, _ = exact
    branch = window.fork()
    before = Snapshot.of(window)
    answer = branch.generate(QUESTION, keep=True, max_new_tokens=4, min_new_tokens=4, **GREEDY)
    assert before.matches(window)
    assert torch.equal(
        sequence_of(branch).input_ids, torch.cat([sequence_of(window).input_ids, QUESTION, answer])
    )
    assert len(branch) == len(window) + 1
    assert set(guarantees(branch)) == {"exact"}
    known = [
        *rig_chunks(window),
        former_of(branch).backbone.chunk_from_tensors(torch.cat([QUESTION, answer])),
    ]
    assert is_a_reprefill(branch, known)
    branch.evict(len(window))
    assert before.matches(branch)


def rig_chunks(window):
    family = next(f for f in FAMILIES if rig(f)[0] is former_of(window).backbone)
    return rig(family)[1]


# -- text ------------------------------------------------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|> {{ m['content'] }} </t> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)
WORDS = [
    "you",
    "watch",
    "a",
    "desk",
    ".",
    "the",
    "cup",
    "is",
    "red",
    "lamp",
    "blue",
    "where",
    "what",
    "moved",
    "left",
    "right",
    "of",
]


@pytest.fixture(scope="module")
def spoken():
    """Qwen2.5-VL with a real, small tokenizer and chat template."""
    special = ["<pad>", "<s>", "</t>", "<unk>", "<|system|>", "<|user|>", "<|assistant|>"]
    fillers = [f"w{i}" for i in range(160 - len(special) - len(WORDS))]
    words = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate([*special, *WORDS, *fillers])}, unk_token="<unk>")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="</t>", pad_token="<pad>", unk_token="<unk>"
    )
    tokenizer.chat_template = TEMPLATE
    return HfEngine(tiny.build("qwen2_5_vl"), tokenizer), tokenizer


def prompt(tokenizer, *turns: str) -> torch.Tensor:
    roles = ["system", *["user", "assistant"] * len(turns)]
    messages = [{"role": r, "content": t} for r, t in zip(roles, turns, strict=False)]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])


def test_a_conversation_in_text_is_the_chat_templates_prompt(spoken):
    backbone, tokenizer = spoken
    system, facts = "you watch a desk .", ["the cup is red . ", "the lamp is blue . "]
    window = KameraWindow(backbone, ChunkStore.open("memory://"), system=system, policy=EXACT)
    for fact in facts:
        window.append(fact)
    asked = "where is the cup"
    ids = prompt(tokenizer, system, "".join(facts) + asked)
    assert torch.equal(torch.cat([sequence_of(window).input_ids, question_ids(window, asked)]), ids[0])
    with torch.no_grad():
        want = backbone.model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, **GREEDY
        )[0, ids.shape[1] :]
    answer = window.generate(asked, max_new_tokens=5, **GREEDY)
    assert answer == tokenizer.decode(want, skip_special_tokens=True)
    assert isinstance(answer, str) and answer

    kept = window.generate(asked, keep=True, max_new_tokens=5, **GREEDY)
    assert kept == answer
    assert window.slots[-1].label == asked
    again = "what moved"
    said = tokenizer.decode(want, skip_special_tokens=False).removesuffix("</t>").strip()
    ids = prompt(tokenizer, system, "".join(facts) + asked, said, again)
    assert torch.equal(torch.cat([sequence_of(window).input_ids, question_ids(window, again)]), ids[0])
    with torch.no_grad():
        logits = backbone.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, -1]
    assert torch.allclose(window.next_token_logits(again), logits, rtol=1e-4, atol=1e-4)


def test_questions_of_several_lengths_share_a_forward_and_have_the_logits_of_each():
    backbone, chunks = rig("qwen2_5_vl")
    window = make(backbone, None, *chunks[:3])
    window.slide()
    asked = [torch.tensor(ids) for ids in ([3, 4, 5], [7], [9, 2])]
    each = torch.stack([window.next_token_logits(ids) for ids in asked])
    with watching(backbone) as seen:
        together = next_token_logits_of(window, asked)
    assert seen.forwards == 1
    assert relative(together, each) <= 1e-5
