"""SubRip files as they come, and the subtitles of given times."""

from pathlib import Path

import pytest

from kamera.eval.tasks.subtitles import Cue, read_srt


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


def test_cues_keep_times_and_lose_tags_and_numbers(tmp_path: Path) -> None:
    text = (
        "1\n01:02:03,500 --> 01:02:04,25\n<i>Two</i>\nlines\n\n2\n0:0:5.001 --> 0:0:6,000\n{\\an8}12\n\n3\n"
    )
    text += "00:00:07,000 --> 00:00:08,000\n\n"
    expected = (Cue(3723.5, 3724.25, "Two lines"), Cue(5.001, 6.0, "12"))
    assert read_srt(write(tmp_path / "a.srt", text)) == expected
    assert read_srt(write(tmp_path / "b.srt", "\ufeff" + text.replace("\n", "\r\n"))) == expected
    unnumbered = "\ufeff00:00:01,000 --> 00:00:02,000\nHi\n"
    assert read_srt(write(tmp_path / "c.srt", unnumbered)) == (Cue(1.0, 2.0, "Hi"),)
    assert read_srt(write(tmp_path / "empty.srt", "\n")) == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1\n00:00 --> 00:01\nx\n", r"bad\.srt:2: time '00:00 --> 00:01'"),
        ("just words\n", r"bad\.srt: no line with '-->'"),
    ],
)
def test_a_broken_file_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_srt(write(tmp_path / "bad.srt", text))
