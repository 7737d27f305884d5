"""The backbone that ships in the package."""

from kamera import Backbone, testbed
from kamera.engines.hf import HfEngine
from kamera.testbed import load, weights_dir


def test_the_package_has_one_backbone_under_eight_megabytes():
    assert [folder.name for folder in weights_dir().parent.iterdir()] == [weights_dir().name]
    assert sum(path.stat().st_size for path in weights_dir().iterdir()) <= 8_000_000


def test_backbones_by_load_and_by_directory_share_an_archive():
    model, processor = load()
    assert not model.training
    by_directory = Backbone.from_pretrained(weights_dir(), dtype="float32").engine
    assert HfEngine(model, processor).fingerprint == by_directory.fingerprint


def test_a_frame_of_the_world_becomes_a_chunk_with_its_picture():
    backbone = HfEngine(*load())
    frame = testbed.World(0).episode(0, layout="LI").frames[0]
    assert "pixel_values" in backbone.chunk(frame.content).inputs
