"""kamera store and inspect on remotes: every verb, on real servers, or refused by name with the way out."""

from __future__ import annotations

import pytest

from kamera.store import ChunkStore
from tests.cli.run import kamera
from tests.store.builders import canonical, patch

NAMES = "abc"
VERBS = ("ls", "stats", "verify", "gc", "pin", "quarantine ls")


@pytest.fixture(params=["redis", "s3", "obstore"])
def url(request, tmp_path):
    if request.param == "obstore":
        return f"obstore+{(tmp_path / 'far').as_uri()}"
    return request.getfixturevalue({"redis": "server"}.get(request.param, "s3")).url("timeout=60")


@pytest.fixture
def filled(url):
    with ChunkStore.open(url) as store:
        for name in NAMES:
            store.put(canonical(name * 64))
            store.put(patch(name * 64))
    return url


def objects(url, **options):
    with ChunkStore.open(url, **options) as store:
        return store.ls()


def as_json(capsys, *arguments):
    done = kamera(capsys, "store", *arguments, "--format", "json")
    return done.code, done.document


@pytest.mark.few(1)
def test_a_remote_is_listed_counted_and_verified(capsys, filled):
    code, listed = as_json(capsys, "ls", filled, "--kind", "canonical", "--limit", "2")
    assert (code, listed["objects"], len(listed["listed"])) == (0, 3, 2)
    assert "?timeout" not in listed["store"] and listed["store"].partition("://")[0] in filled
    code, counted = as_json(capsys, "stats", filled)
    assert (code, counted["objects"], counted["chunks"], counted["remote"]["pending"]) == (0, 6, 3, 0)
    code, report = as_json(capsys, "verify", filled)
    assert (code, report["ok"], report["quarantined"]) == (0, 6, [])


@pytest.mark.few(1)
def test_pins_and_gc_of_a_remote(capsys, filled):
    of_a = sum(info.bytes for info in objects(filled) if info.chunk_id == "a" * 64)
    code, document = as_json(capsys, "pin", filled, "a" * 64, "--ttl", "7d", "--cap", "1GiB")
    assert (code, len(document["pins"]), document["cap"]) == (0, 2, 2**30)
    assert as_json(capsys, "pin", filled)[1] == document
    dry = as_json(capsys, "gc", filled, "--max-bytes", of_a, "--dry-run")[1]
    assert len(objects(filled)) == 6 and len(dry["removed"]) == 4
    code, done = as_json(capsys, "gc", filled, "--max-bytes", "0")
    assert (code, done["fits"], done["bytes_after"]) == (1, False, of_a)
    assert {info.chunk_id for info in objects(filled)} == {"a" * 64}
    refused = kamera(capsys, "store", "gc", filled, "--every-tenant")
    assert refused.code == 1 and "keeps tenants apart" in refused.err
    assert as_json(capsys, "unpin", filled, "aaaa")[1]["unpinned"] == 2
    assert as_json(capsys, "gc", filled, "--max-bytes", "0")[0] == 0
    assert objects(filled) == []


def test_a_remote_that_is_dead_is_an_error_and_no_empty_store(capsys, tmp_path):
    dead = f"redis+unix://{tmp_path}/none?timeout=0.2&retries=0"
    for verb in VERBS:
        done = kamera(capsys, "store", *verb.split(), dead)
        assert (done.code, done.out) == (1, "") and "does not answer" in done.err, verb
        assert len([line for line in done.err.splitlines() if line.startswith("error:")]) == 1
    assert kamera(capsys, "inspect", dead).code == 1
    assert list(tmp_path.iterdir()) == []


def test_a_url_with_a_password_from_a_file_is_never_shown(capsys, server, tmp_path):
    server.client().config_set("requirepass", "hunter2")
    try:
        (tmp_path / "url").write_text(f"redis+unix://:hunter2@{server.socket}?timeout=60\n")
        done = kamera(capsys, "store", "stats", f"@{tmp_path / 'url'}", "--format", "json")
        assert (done.code, done.document["objects"]) == (0, 0)
        assert "hunter2" not in done.out + done.err
    finally:
        import redis

        client = redis.Redis(unix_socket_path=str(server.socket), password="hunter2")
        client.config_set("requirepass", "")
