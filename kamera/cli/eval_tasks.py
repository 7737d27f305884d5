"""``kamera eval mm-niah|milebench|muirbench|video-mme|egoschema``: published benchmarks under reuse."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kamera.cli.options import ArmModules, Device, Dtype, File, Form, Format, Precision, Quiet
from kamera.cli.output import Output, finite

if TYPE_CHECKING:
    from kamera.eval.tasks.report import Results


class ReuseScope(str, Enum):
    """The part of a prompt that reusing arms reuse."""

    context = "context"
    all = "all"


Data = Annotated[
    Path, typer.Option("--data", exists=True, file_okay=False, help="The benchmark's folder, as published.")
]
Out = Annotated[
    Path,
    typer.Option("--out", file_okay=False, help="Answers and predictions; the same command resumes there."),
]
ModelName = Annotated[
    str, typer.Option("--model", help="Model directory or hub name; 'testbed' for the shipped one.")
]
Arms = Annotated[
    str,
    typer.Option(help="Arms to compare: native, reprefill, blind, patch@RANK, those of --arm-module."),
]
Limit = Annotated[int | None, typer.Option(min=1, help="At most so many samples of each annotation file.")]
Subtasks = Annotated[
    list[str] | None, typer.Option("--subtask", help="Only this subtask; give it again for more.")
]
MaxTokens = Annotated[
    int | None, typer.Option(min=1, help="Longest prompt in tokens [default: the model's position limit].")
]
Drawn = Annotated[
    int | None, typer.Option("--sample", min=1, help="Ask so many samples, drawn by --seed from all.")
]
Seed = Annotated[int, typer.Option(min=0, help="Which samples --sample draws.")]
Shard = Annotated[
    str | None,
    typer.Option(
        metavar="I/N", help="Ask only this share of the samples; a folder each, then kamera eval merge."
    ),
]
System = Annotated[str | None, typer.Option(help="System prompt [default: the chat template's own].")]
Resume = Annotated[bool, typer.Option(help="Resume the run in --out, or refuse a folder that has one.")]
Frames = Annotated[int | None, typer.Option("--frames", min=1, help="Frames of a video, evenly spaced.")]
Rate = Annotated[float | None, typer.Option("--fps", min=0.001, help="Frames of a video per second.")]
Clips = Annotated[int, typer.Option(min=1, help="Chunks that a video is cut into.")]
ReuseRule = Annotated[
    ReuseScope,
    typer.Option("--reuse", help="Reuse the context, or also question and choices before its end."),
]
Pixels = Annotated[int | None, typer.Option(min=1, help="Most pixels of a picture or frame.")]
Side = Annotated[int | None, typer.Option(min=1, help="Longest side of a picture or frame, in pixels.")]
Plots = Annotated[
    bool,
    typer.Option("--plots", help="Figures too, in --out/plots (heat maps for MM-NIAH); needs matplotlib."),
]
Options = dict[str, Any]
ARMS = "reprefill,blind,patch@16"


class Split(str, Enum):
    """MM-NIAH's splits; the labels of ``test`` are private."""

    val = "val"
    test = "test"


class PromptForm(str, Enum):
    """Source of the prompt and of the answer extraction."""

    official = "official"
    lmms_eval = "lmms-eval"


def _verb(name: str) -> Callable[[Callable[..., Options]], Callable[..., None]]:
    """Decorator: a function of a benchmark's own options becomes a verb with `_run`'s options too."""

    def join(own: Callable[..., Options]) -> Callable[..., None]:
        mine, shared = (inspect.signature(f, eval_str=True).parameters for f in (own, _run))
        joined = [*mine.values(), *(p for n, p in shared.items() if n not in ("name", "options"))]

        def verb(**given: Any) -> None:
            _run(name, own(**{n: given.pop(n) for n in mine}), **given)

        keyword = inspect.Parameter.KEYWORD_ONLY
        verb.__signature__ = inspect.Signature([p.replace(kind=keyword) for p in joined])  # type: ignore[attr-defined]
        verb.__annotations__ = {p.name: p.annotation for p in joined}
        verb.__doc__ = own.__doc__
        return verb

    return join


def _run(
    name: str,
    options: Options,
    data: Data,
    out: Out,
    model: ModelName = "testbed",
    arms: Arms = ARMS,
    arm_module: ArmModules = None,
    limit: Limit = None,
    sample: Drawn = None,
    seed: Seed = 0,
    shard: Shard = None,
    max_tokens: MaxTokens = None,
    system: System = None,
    reuse: ReuseRule = ReuseScope.context,
    max_pixels: Pixels = None,
    image_size: Side = None,
    resume: Resume = True,
    plots: Plots = False,
    device: Device = None,
    dtype: Precision = Dtype.auto,
    format: Form = Format.table,
    output: File = None,
    quiet: Quiet = False,
) -> None:
    """Run a benchmark and write its tables."""
    from kamera.cli.models import load_backbone
    from kamera.eval.adapter import arms_of
    from kamera.eval.arms import arms_named
    from kamera.eval.tasks.plots import check_plots
    from kamera.eval.tasks.registry import make_task
    from kamera.eval.tasks.run import run_task
    from kamera.eval.tasks.selection import Selection, parse_shard

    written = Output(format, output, quiet)
    task = make_task(name, **options)
    names = [arm.strip() for arm in arms.split(",")]
    others = arms_of(arm_module or ())
    arms_named(names, others)  # fails before the model is loaded
    if plots:
        check_plots()
    share = None if shard is None else parse_shard(shard)
    Selection(limit, sample, seed, share)
    backbone = load_backbone(model, device, dtype, show_progress=written.shows_progress)
    with written.progress(None, "sample") as bar:
        results = run_task(
            backbone,
            task,
            data,
            out,
            arms=names,
            others=others,
            limit=limit,
            sample=sample,
            seed=seed,
            shard=share,
            max_tokens=max_tokens,
            system=system,
            reuse=reuse.value,
            max_pixels=max_pixels,
            image_size=image_size,
            resume=resume,
            on_item=bar.update,
        )
    about = {"model": model, "backbone": backbone.fingerprint, "options": options}
    _write(written, results, out, about, plots)


def merge(
    runs: Annotated[
        list[Path], typer.Argument(metavar="DIR...", exists=True, file_okay=False, help="Folders of runs.")
    ],
    out: Annotated[Path, typer.Option("--out", file_okay=False, help="Folder for the joined run.")],
    plots: Plots = False,
    format: Form = Format.table,
    output: File = None,
    quiet: Quiet = False,
) -> None:
    """Join runs of one benchmark (shards, other samples, other arms) into one, without model or data."""
    from kamera.eval.tasks.merge import merge as join

    about = {"merged": [str(run) for run in runs]}
    _write(Output(format, output, quiet), join(runs, out), out, about, plots)


def _write(written: Output, results: Results, out: Path, about: dict[str, Any], plots: bool) -> None:
    """Write tables or the document, and figures on demand. Exit code 1 if no item was answered."""
    from kamera.cli.eval_tables import tables
    from kamera.eval.tasks.plots import draw

    for problem in results.problems:
        written.note(str(problem))
    drawn = [str(file) for file in draw(results, out / "plots")] if plots else []
    document = finite({**about, **results.document(), "plots": drawn})
    ending = f"predictions and items: {out}" + "".join(f"\n{file}" for file in drawn)
    written.write(document, [*tables(results), ending])
    if not results.items:
        written.note("no item was answered under every arm")
        raise typer.Exit(1)


@_verb("mm-niah")
def mm_niah(
    subtask: Subtasks = None,
    split: Annotated[Split, typer.Option(help="Labels of test are private: predictions only.")] = Split.val,
    bare: Annotated[bool, typer.Option("--bare", help="Leave the answer instruction out.")] = False,
) -> Options:
    """MM-NIAH: needles in long documents of text and images.

    --bare is for models that do not follow instructions, such as the shipped one; its scores are not
    comparable with published ones.
    """
    return {"subtasks": tuple(subtask or ()), "split": split.value, "bare": bare}


@_verb("milebench")
def milebench(subtask: Subtasks = None) -> Options:
    """MileBench: long contexts of many images. A subtask is a dataset or a code such as T-1."""
    return {"subtasks": tuple(subtask or ())}


@_verb("muirbench")
def muirbench(
    subtask: Subtasks = None,
    prompt: Annotated[PromptForm, typer.Option(help="Prompt and answer extraction.")] = PromptForm.official,
) -> Options:
    """MuirBench: multiple choice over several images."""
    return {"subtasks": tuple(subtask or ()), "form": prompt.value}


@_verb("video-mme")
def video_mme(subtask: Subtasks = None, frames: Frames = None, fps: Rate = None, clips: Clips = 4) -> Options:
    """Video-MME: multiple choice over videos, without and with subtitles."""
    return {"subtasks": tuple(subtask or ()), "num_frames": frames, "fps": fps, "clips": clips}


@_verb("egoschema")
def egoschema(subtask: Subtasks = None, frames: Frames = None, fps: Rate = None, clips: Clips = 4) -> Options:
    """EgoSchema: multiple choice over three-minute videos."""
    return {"subtasks": tuple(subtask or ()), "num_frames": frames, "fps": fps, "clips": clips}
