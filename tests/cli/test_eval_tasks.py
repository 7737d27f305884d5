"""``kamera eval mm-niah …``: benchmarks from the command line."""

import pytest

from kamera.testbed.benchmarks import write_mm_niah
from tests.cli.run import kamera

NIAH = ("eval", "mm-niah", "--bare", "--subtask", "reasoning-text", "--limit", "2")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_mm_niah(tmp_path_factory.mktemp("data"), episodes=1, questions=2, layouts=("LI",))


def test_a_benchmark_runs_from_files_to_a_table_and_to_json(capsys, data, tmp_path):
    arms = ("--arms", "reprefill, blind,patch@16", "--data", data, "--out", tmp_path / "out")
    document = kamera(capsys, *NIAH, *arms, "--format", "json").document
    assert [arm["arm"] for arm in document["arms"]] == ["reprefill", "blind", "patch@16"]
    assert document["items"] == document["labelled"] == 2
    assert document["arms"][0]["agreement"] == 1.0
    assert document["arms"][0]["summary"]["official"] is None  # contexts of less than 1k tokens

    items = (tmp_path / "out" / "items.jsonl").read_bytes()
    again = kamera(capsys, *NIAH, *arms)
    assert again.code == 0 and (tmp_path / "out" / "items.jsonl").read_bytes() == items
    assert "2 items, 2 labelled, 0 skipped" in again.out and "patch@16" in again.out
    assert "by length and depth" in again.out
    refused = kamera(capsys, *NIAH, *arms, "--no-resume")
    assert refused.code == 2 and "already holds a run" in refused.err


@pytest.mark.parametrize(
    "arguments, code, said",
    [
        (("--arms", "reprefill,magic"), 2, "'magic' is none of reprefill, native, blind,"),
        (("--subtask", "counting-video"), 2, "no subtask 'counting-video'"),
        (("--split", "test"), 1, "no MM-NIAH annotations"),
        (("--limit", "0"), 2, "--limit"),
    ],
)
def test_bad_usage_is_one_line_and_writes_nothing(capsys, data, tmp_path, arguments, code, said):
    run = kamera(capsys, *NIAH, "--data", data, "--out", tmp_path / "out", *arguments)
    assert run.code == code and said in " ".join(run.err.split())
    assert not (tmp_path / "out" / "items.jsonl").exists()


def test_shards_are_run_and_merged_from_the_command_line(capsys, data, tmp_path):
    for i in (1, 2):
        run = kamera(
            *(capsys, *NIAH, "--data", data, "--out", tmp_path / str(i), "--shard", f"{i}/2"),
            *("--sample", "2", "--seed", "3", "--arms", "blind"),
        )
        assert run.code == 0 and "1 items" in run.out
    joined = kamera(
        capsys,
        "eval",
        "merge",
        tmp_path / "1",
        tmp_path / "2",
        "--out",
        tmp_path / "whole",
        "--format",
        "json",
    )
    assert joined.code == 0 and joined.document["items"] == 2
    refused = kamera(capsys, *NIAH, "--data", data, "--out", tmp_path / "3", "--shard", "3/2")
    assert refused.code == 2 and "3/2" in refused.err
