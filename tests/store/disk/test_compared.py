"""Files and rows of a folder, compared by their stamps."""

from __future__ import annotations

from kamera.store.disk.compared import Difference, compared


def test_a_copied_file_is_moved_and_another_one_unlike():
    rows = {"same": "1-10-5", "copied": "1-10-5", "changed": "1-10-5", "left": "1-10-5"}
    files = {"same": "1-10-5", "copied": "2-10-5", "changed": "1-11-6", "new": "3-10-5"}
    assert compared(files, rows) == Difference(moved=("copied",), unlike=("changed", "new"))
    assert compared({}, rows) == Difference((), ())
    assert compared(files, {}).unlike == tuple(files)
