"""Video files of the kinds that people have, against a slow reference that decodes everything."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image, ImageSequence

from kamera import read_video
from kamera.content import MediaLimits
from kamera.content.video import load_clip, processor_media
from kamera.errors import UnreadableMedia
from tests.sessions.rig import seeing

RECORDING = [*range(0, 1000, 50), 2000, 3000, 4000, 5000, 6000, 7000, 8000]
"""Milliseconds of a screen recording: 20 frames in the first second, then one a second."""

STILL = [0, 40, 80, 120, 9000]


@dataclass
class File:
    """How a file is written: milliseconds of its frames, the turn in its header, and what else it holds."""

    suffix: str
    codec: str = "libx264"
    times: list[int] = field(default_factory=lambda: list(range(0, 2000, 200)))
    turn: tuple[int, bool, bool] = (0, False, False)
    size: tuple[int, int] = (64, 32)
    audio: bool = False
    rate: int = 1000
    cut: int = 0  # milliseconds that an edit list leaves out
    options: dict[str, str] = field(default_factory=dict)


FILES = {
    "constant rate, no audio": File("mp4", rate=5),
    "with audio": File("mp4", rate=5, audio=True),
    "variable rate": File("mp4", times=RECORDING, options={"bf": "0"}),
    "variable rate, B-frames, a still": File("mkv", times=STILL, options={"bf": "2"}),
    "turned by 90": File("mp4", turn=(90, False, False)),
    "turned by 180": File("mov", turn=(180, False, False)),
    "turned by 270, variable rate": File("mkv", times=RECORDING, turn=(270, False, False)),
    "mirrored": File("mp4", turn=(0, True, False)),
    "turned and mirrored": File("mp4", turn=(90, True, False)),
    "B-frames": File("mp4", times=list(range(0, 4000, 40)), options={"bf": "3", "g": "25"}),
    "cut start": File("mp4", times=list(range(0, 4000, 40)), cut=1000, options={"bf": "2", "g": "100"}),
    "late start": File("ts", times=list(range(10_000, 12_000, 200)), rate=5),
    "late start, audio from the beginning": File("mkv", times=list(range(700, 2700, 200)), audio=True),
    "odd sides, webm": File("webm", codec="libvpx", size=(63, 35)),
    "avi": File("avi", codec="mpeg4", rate=5),
}


def shade(number: int, size: tuple[int, int]) -> np.ndarray:
    """A frame that no turn or mirror leaves as it is, and no other frame equals."""
    frame = np.full((size[1], size[0], 3), (10 + 2 * number) % 256, np.uint8)
    frame[: size[1] // 2, : size[0] // 3] = (255, 0, 0)
    return frame


def write(path: Path, file: File) -> Path:
    tick, written = Fraction(1, 1000), path.with_suffix(f".{file.suffix}")
    first = written if not file.cut else path.with_suffix(".whole.mp4")
    with av.open(str(first), "w") as container:
        stream = container.add_stream(file.codec, rate=file.rate, options=file.options)
        stream.width, stream.height, stream.pix_fmt = *file.size, "yuv420p"
        stream.codec_context.time_base = Fraction(1, file.rate)
        if any(file.turn):
            stream.set_display_rotation(*file.turn)
        sound = container.add_stream("aac", rate=16000, layout="mono") if file.audio else None
        if sound is not None:
            samples = av.AudioFrame.from_ndarray(
                np.zeros((1, 16000), np.float32), format="fltp", layout="mono"
            )
            samples.sample_rate, samples.pts = 16000, 0
            container.mux([*sound.encode(samples), *sound.encode()])
        for number, time in enumerate(file.times):
            frame = av.VideoFrame.from_ndarray(shade(number, file.size), format="rgb24")
            frame.pts, frame.time_base = time, tick
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    if file.cut:  # packets from before the beginning: a cut that is not at a key frame
        with (
            av.open(str(first)) as whole,
            av.open(str(written), "w", options={"avoid_negative_ts": "0"}) as cut,
        ):
            source = whole.streams.video[0]
            copy = cut.add_stream_from_template(source)
            for packet in whole.demux(source):
                if packet.size:
                    packet.pts -= int(Fraction(file.cut, 1000) / packet.time_base)
                    packet.dts -= int(Fraction(file.cut, 1000) / packet.time_base)
                    packet.stream = copy
                    cut.mux(packet)
    return written


def decode_all(path: Path, turn: tuple[int, bool, bool]) -> list[tuple[float, np.ndarray]]:
    """Every frame: its time, and its pixels as the writer wants them shown."""
    degrees, mirrored, flipped = turn
    out = []
    with av.open(str(path)) as container:
        for frame in container.decode(video=0):
            pixels = np.rot90(frame.to_ndarray(format="rgb24"), degrees // 90)
            pixels = pixels[:, ::-1] if mirrored else pixels
            out.append((frame.time, pixels[::-1] if flipped else pixels))
    return out


def places(times: list[float], options: dict[str, Any], end: float) -> list[int]:
    """The slow way to sample: of every even time the nearest frame."""
    part = [i for i, t in enumerate(times) if options.get("start", 0) <= t <= options.get("end", 1e9)]
    length = (times[part[-1] + 1] if part[-1] + 1 < len(times) else end) - times[part[0]]
    count = max(1, min(options.get("num_frames", options.get("max_frames", len(part))), len(part)))
    if "fps" in options:
        count = max(1, round(length * options["fps"]))
    out: list[int] = []
    for k in range(count):
        share = k / max(1, count - 1)
        wanted = times[part[0]] + (times[part[-1]] - times[part[0]]) * share
        nearest = min(range(len(part)), key=lambda n: (round(abs(times[part[n]] - wanted), 6), n % 2))
        out.append(part[nearest])
    if "fps" in options:
        return sorted(set(out))
    for k in range(1, count):  # one that is taken gives way to the next
        out[k] = max(out[k], out[k - 1] + 1)
    return [min(place, part[len(part) - count + k]) for k, place in enumerate(out)]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"fps": 1},
    {"fps": 2.5},
    {"num_frames": 1},
    {"num_frames": 4},
    {"num_frames": 9},
    {"max_frames": 3},
]


@pytest.fixture(scope="module", params=FILES)
def video(request, tmp_path_factory) -> tuple[Path, File]:
    file = FILES[request.param]
    return write(tmp_path_factory.mktemp("video") / "clip", file), file


@pytest.mark.few(3)
def test_frames_and_times_are_those_of_a_whole_decode(video):
    path, file = video
    frames = decode_all(path, file.turn)
    times = [time for time, _ in frames]
    wanted = [(t - file.cut) / 1000 for t in file.times if t >= file.cut]
    if file.suffix != "ts":  # its muxer moves the beginning
        assert times == pytest.approx(wanted, abs=1e-3)
    whole = read_video(path)
    end = whole.start + whole.duration
    first, last = times[0], times[-1]
    parts = [{"start": first + 0.2}, {"end": last - 0.1}, {"start": times[len(times) // 2], "end": last}]
    parts += [{"start": first + 0.2, "num_frames": 2}, {"end": last - 0.1, "fps": 2}]
    for options in [*OPTIONS, *parts]:
        clip = read_video(path, **options)
        indices = places(times, options, end)
        assert list(clip.indices) == indices, options
        assert clip.seconds == tuple(times[i] for i in indices)
        assert clip.total_frames == len(times)
        assert all(
            np.array_equal(np.asarray(f), frames[i][1]) for f, i in zip(clip.frames, indices, strict=True)
        )


def test_true_times_reach_the_processor(tmp_path):
    clip = read_video(write(tmp_path / "clip", FILES["variable rate"]), start=0.9)
    (told,) = processor_media([], [clip])["video_metadata"]
    assert [place / told["fps"] for place in told["frames_indices"]] == pytest.approx(list(clip.seconds))
    assert (
        told["total_num_frames"] / told["fps"]
        == pytest.approx(told["duration"])
        == pytest.approx(8.0, abs=0.5)
    )


# -- animated pictures -----------------------------------------------------------------------------


def pictures(count: int) -> list[Image.Image]:
    return [Image.fromarray(shade(20 * i, (32, 16))) for i in range(count)]


@pytest.mark.few(3)
@pytest.mark.parametrize("suffix", ["gif", "webp", "apng", "png"])
def test_an_animated_picture_is_a_clip_and_a_still_one_a_picture(tmp_path, suffix):
    moving, still = tmp_path / f"moving.{suffix}", tmp_path / f"still.{suffix}"
    kind = "PNG" if suffix == "apng" else None
    first, *others = pictures(4)
    lengths = [100, 200, 1000, 50]
    lossless = {"lossless": True} if suffix == "webp" else {}
    first.save(moving, kind, save_all=True, append_images=others, duration=lengths, **lossless)
    first.save(still, kind, **lossless)
    clip = read_video(moving)
    assert clip.seconds == pytest.approx((0.0, 0.1, 0.3, 1.3))
    assert (clip.duration, clip.total_frames) == (pytest.approx(1.35), 4)
    with Image.open(moving) as image:
        frames = [frame.convert("RGB") for frame in ImageSequence.Iterator(image)]
    assert all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(clip.frames, frames, strict=True))
    assert read_video(moving, start=0.25, end=1.0).indices == (2,)
    backbone = seeing()
    for name in (moving, str(moving), moving.as_uri()):
        assert backbone.chunk(name).id == backbone.chunk(clip).id
    for name in (still, str(still)):
        assert backbone.chunk(name).id == backbone.chunk({"type": "image", "image": still}).id
    assert backbone.chunk({"type": "image", "image": moving}).id == backbone.chunk(frames[0]).id


# -- bounds ----------------------------------------------------------------------------------------


def test_a_small_file_of_many_or_giant_frames_is_refused_before_it_is_decoded(tmp_path):
    many = write(tmp_path / "many", File("mp4", times=list(range(0, 4000, 10)), size=(16, 16)))
    with pytest.raises(UnreadableMedia, match=r"400 frames of 16 x 16 pixels.*more than 50000 in all"):
        read_video(many, num_frames=1, limits=MediaLimits(video=50_000))
    with pytest.raises(UnreadableMedia, match=r"400 frames of 16 x 16 pixels.*take fewer"):
        read_video(many, limits=MediaLimits(clip=50_000))
    assert len(read_video(many, num_frames=5, limits=MediaLimits(clip=100_000)).frames) == 5
    with pytest.raises(UnreadableMedia, match="16 x 16 pixels, more than 255"):
        read_video(many, limits=MediaLimits(picture=255))
    with pytest.raises(UnreadableMedia, match="bytes, more than 99"):
        read_video(many.read_bytes(), limits=MediaLimits(file=99))
    moving = tmp_path / "moving.gif"
    pictures(1)[0].save(moving, save_all=True, append_images=pictures(30)[1:])
    with pytest.raises(UnreadableMedia, match="more than 5000 in all"):
        read_video(moving, limits=MediaLimits(video=5000))
    large = write(tmp_path / "large", File("mp4", times=list(range(0, 400, 40)), size=(320, 240)))
    tight = MediaLimits(clip=200_000)
    with pytest.raises(UnreadableMedia, match="10 frames of 320 x 240 pixels"):
        load_clip({"video": str(large)}, limits=tight)
    small = load_clip({"video": str(large), "max_pixels": 28 * 28}, 4, limits=tight)
    assert [frame.size for frame in small.frames] == [(32, 24)] * 10
