"""``kamera eval mm-niah|milebench|muirbench|video-mme|egoschema|reuse``: benchmarks under reuse."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kamera.cli.command import command
from kamera.cli.options import ArmModules, Loading, ModelOption
from kamera.cli.output import Output, nan_to_null

if TYPE_CHECKING:
    from kamera.eval.tasks.report import Results

Subtasks = Annotated[
    list[str] | None, typer.Option("--subtask", help="Only this subtask; give it again for more.")
]
Frames = Annotated[int | None, typer.Option("--frames", min=1, help="Frames of a video, evenly spaced.")]
Rate = Annotated[float | None, typer.Option("--fps", min=0.001, help="Frames of a video per second.")]
Clips = Annotated[int, typer.Option(min=1, help="Chunks that a video is cut into.")]


@dataclass(frozen=True)
class TaskOptions:
    """Which samples are asked and how: arguments of `kamera.eval.tasks.run_task`."""

    limit: Annotated[int | None, typer.Option(min=1, help="At most N samples of each file.")] = None
    sample: Annotated[int | None, typer.Option(min=1, help="Ask N samples, drawn by --seed from all.")] = None
    seed: Annotated[int, typer.Option(min=0, help="Which samples --sample draws.")] = 0
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Longest prompt in tokens [default: the model's position limit]."),
    ] = None
    system: Annotated[str | None, typer.Option(help="System prompt [default: the template's own].")] = None
    reuse: Annotated[
        Literal["context", "all"],
        typer.Option(help="Reuse the context, or also question and choices before its end."),
    ] = "context"
    max_pixels: Annotated[int | None, typer.Option(min=1, help="Most pixels of a picture or frame.")] = None
    image_size: Annotated[
        int | None, typer.Option(min=1, help="Longest side of a picture or frame, in pixels.")
    ] = None
    resume: Annotated[
        bool, typer.Option(help="Resume the run in --out, or refuse a folder that has one.")
    ] = True


@dataclass(frozen=True)
class TaskRun:
    """A run of any of these benchmarks."""

    data: Annotated[
        Path, typer.Option(exists=True, file_okay=False, help="The benchmark's folder, as published.")
    ]
    out: Annotated[
        Path, typer.Option(file_okay=False, help="Answers and predictions; the same command resumes there.")
    ]
    loading: Loading
    written: Output
    model: ModelOption = "testbed"
    arms: Annotated[
        str,
        typer.Option(help="Arms to compare: native, reprefill, blind, patch@RANK, those of --arm-module."),
    ] = "reprefill,blind,patch@16"
    arm_module: ArmModules = None
    shard: Annotated[
        str,
        typer.Option(
            metavar="I/N",
            help="Ask only this share of the samples, in its own folder; kamera eval merge joins.",
        ),
    ] = "1/1"
    options: TaskOptions = TaskOptions()

    def ask(self, name: str, **options: Any) -> None:
        """Run the benchmark ``name`` under its own ``options``, and write its tables."""
        from kamera.eval.arms import arms_named, arms_of
        from kamera.eval.tasks.registry import make_task
        from kamera.eval.tasks.run import run_task
        from kamera.eval.tasks.selection import Selection

        task, common = make_task(name, **options), self.options
        names = [arm.strip() for arm in self.arms.split(",")]
        others = arms_of(self.arm_module or ())
        arms_named(names, others)  # fails before the model is loaded
        Selection(common.limit, common.sample, common.seed, self.shard)
        backbone = self.loading.load(self.model, show_progress=self.written.shows_progress)
        with self.written.progress(None, "sample") as bar:
            arguments = {"arms": names, "others": others, "shard": self.shard, "bar": bar, **vars(common)}
            results = run_task(backbone, task, self.data, self.out, **arguments)
        about = {"model": self.model, "backbone": backbone.fingerprint, "options": options}
        _write(self.written, results, self.out, about)


@command
def merge(
    written: Output,
    runs: Annotated[
        list[Path], typer.Argument(metavar="DIR...", exists=True, file_okay=False, help="Folders of runs.")
    ],
    out: Annotated[Path, typer.Option("--out", file_okay=False, help="Folder for the joined run.")],
) -> None:
    """Join runs of one benchmark (shards, other samples, other arms) into one, without model or data."""
    from kamera.eval.tasks.merge import merge as join

    about = {"merged": [str(run) for run in runs]}
    _write(written, join(runs, out), out, about)


def _write(writer: Output, results: Results, out: Path, about: dict[str, Any]) -> None:
    """Write tables or the document. Exit code 1 if no item was answered."""
    from kamera.cli.eval_tables import tables

    for problem in results.problems:
        writer.note(str(problem))
    for wrong, right in results.unseen:
        writer.note(f"cannot tell: {wrong} is not below {right} here; ask more items")
    document = nan_to_null({**about, **results.document()})
    writer.write(document, [*tables(results), f"predictions and items: {out}"])
    if not results.items:
        writer.note("no item was answered under every arm")
        raise typer.Exit(1)


@command
def mm_niah(
    run: TaskRun,
    subtask: Subtasks = None,
    split: Annotated[
        Literal["val", "test"], typer.Option(help="Labels of test are private: predictions only.")
    ] = "val",
    bare: Annotated[bool, typer.Option("--bare", help="Leave the answer instruction out.")] = False,
) -> None:
    """MM-NIAH: needles in long documents of text and images.

    --bare is for models that do not follow instructions, such as the shipped one; its scores are not
    comparable with published ones.
    """
    run.ask("mm-niah", subtasks=tuple(subtask or ()), split=split, bare=bare)


@command
def milebench(run: TaskRun, subtask: Subtasks = None) -> None:
    """MileBench: long contexts of many images. A subtask is a dataset or a code such as T-1."""
    run.ask("milebench", subtasks=tuple(subtask or ()))


@command
def muirbench(
    run: TaskRun,
    subtask: Subtasks = None,
    prompt: Annotated[
        Literal["official", "lmms-eval"], typer.Option(help="Prompt and answer extraction.")
    ] = "official",
) -> None:
    """MuirBench: multiple choice over several images."""
    run.ask("muirbench", subtasks=tuple(subtask or ()), form=prompt)


@command
def video_mme(
    run: TaskRun, subtask: Subtasks = None, frames: Frames = None, fps: Rate = None, clips: Clips = 4
) -> None:
    """Video-MME: multiple choice over videos, without and with subtitles."""
    run.ask("video-mme", subtasks=tuple(subtask or ()), num_frames=frames, fps=fps, clips=clips)


@command
def egoschema(
    run: TaskRun, subtask: Subtasks = None, frames: Frames = None, fps: Rate = None, clips: Clips = 4
) -> None:
    """EgoSchema: multiple choice over three-minute videos."""
    run.ask("egoschema", subtasks=tuple(subtask or ()), num_frames=frames, fps=fps, clips=clips)


@command
def reuse(run: TaskRun, subtask: Subtasks = None) -> None:
    """The benchmark of reuse (kamera eval freeze): what a context went through before a question.

    A subtask is a trace. The system prompt is the benchmark's, unless --system is given.
    """
    from kamera.eval.reuse import load

    system = load(run.data).system if run.options.system is None else run.options.system
    replace(run, options=replace(run.options, system=system)).ask("reuse", subtasks=tuple(subtask or ()))
