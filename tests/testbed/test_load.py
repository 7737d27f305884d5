"""The backbone that ships in the package."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from kamera import Backbone, testbed
from kamera.cli.options import Loading
from kamera.engines.hf import HfEngine, ServedModel
from kamera.testbed import load, weights_dir


def test_the_package_has_one_backbone_and_one_reader_in_small_files():
    shipped = Path(testbed.__file__).parent / "weights"
    assert {folder.name for folder in shipped.iterdir()} == {weights_dir().name, "screen-reader"}
    for folder in shipped.iterdir():
        assert max(path.stat().st_size for path in folder.iterdir()) <= 4_500_000
        assert sum(path.stat().st_size for path in folder.iterdir()) <= 8_500_000


def test_the_model_directory_is_unpacked_whole_into_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with ThreadPoolExecutor() as pool:
        folders = set(pool.map(lambda _: weights_dir.__wrapped__(), range(4)))
    (folder,) = folders
    assert folder.is_relative_to(tmp_path)
    assert (folder / "model.safetensors").stat().st_size > 5_000_000
    assert sorted(file.name for file in folder.iterdir()) == sorted(
        file.name for file in weights_dir().iterdir()
    )
    assert (folder / "model.safetensors").read_bytes() == (weights_dir() / "model.safetensors").read_bytes()


@pytest.mark.few(1)
@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_file_that_was_cut_or_removed_is_unpacked_again(monkeypatch, tmp_path, file):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = weights_dir.__wrapped__()
    for damage in (folder / file).unlink, partial((folder / file).write_bytes, b"{"):
        damage()
        assert weights_dir.__wrapped__() == folder
        assert (folder / file).read_bytes() == (weights_dir() / file).read_bytes()


def test_the_shipped_model_is_the_same_by_name_by_directory_by_load_and_by_the_command_line(
    monkeypatch, tmp_path
):
    (tmp_path / "testbed").mkdir()
    monkeypatch.chdir(tmp_path)  # a folder of that name is ./testbed
    model, processor = load()
    assert not model.training
    by_load = HfEngine(model, processor)
    by_name, by_directory = (Backbone.from_pretrained(name) for name in ("testbed", weights_dir()))
    by_verb = Loading().load("testbed", show_progress=False)
    assert {b.fingerprint for b in (by_name, by_directory, by_verb)} == {by_load.fingerprint}
    assert by_name.describe().dtype == "float32"
    served = ServedModel("testbed")  # of files alone: another fingerprint, of the same dtype
    assert served.fingerprint == Backbone.from_pretrained("testbed", by_files=True).fingerprint
