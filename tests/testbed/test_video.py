"""Frames into an mp4 and back."""

import av
import numpy as np
import pytest
from PIL import Image

from kamera.testbed import World, read_frames, render_video


@pytest.mark.parametrize("hold", [1, 3])
def test_a_recorded_frame_looks_like_the_drawn_one(tmp_path, hold):
    frames = World(0).episode(0, layout="LPI").frames
    render_video(frames, tmp_path / "frames.mp4", hold=hold)
    with av.open(str(tmp_path / "frames.mp4")) as container:
        assert sum(1 for _ in container.decode(video=0)) == hold * len(frames)
    decoded = read_frames(tmp_path / "frames.mp4")
    assert len(decoded) == len(frames)
    for image, frame in zip(decoded, frames, strict=True):
        assert image.mode == "RGB" and image.size == frame.image.size
        difference = np.abs(np.asarray(image).astype(int) - np.asarray(frame.image))
        assert difference.mean() < 5


def test_a_video_of_someone_else_gives_all_its_pictures(tmp_path):
    with av.open(str(tmp_path / "other.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=4)
        stream.width, stream.height, stream.pix_fmt = 64, 32, "yuv420p"
        for level in (0, 120, 240):
            picture = np.full((32, 64, 3), level, dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    decoded = read_frames(tmp_path / "other.mp4")
    assert [image.size for image in decoded] == [(64, 32)] * 3
    assert [round(np.asarray(image).mean() / 120) for image in decoded] == [0, 1, 2]


def test_a_video_of_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="needs frames"):
        render_video([], tmp_path / "none.mp4")
    with pytest.raises(ValueError, match="needs frames"):
        render_video([Image.new("RGB", (16, 16))], tmp_path / "none.mp4", hold=0)
