"""kamera store and inspect on remotes: every verb, on real servers, or refused by name with the way out."""

from __future__ import annotations

import pytest

from kamera.store import ChunkStore, StoreAdmin
from tests.cli.run import files, kamera
from tests.store.builders import CONTEXT, assert_same, canonical, patch

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


def test_a_remote_is_listed_counted_and_verified(capsys, filled):
    code, listed = as_json(capsys, "ls", filled, "--kind", "canonical", "--limit", "2")
    assert (code, listed["objects"], len(listed["listed"])) == (0, 3, 2)
    assert "?timeout" not in listed["store"] and listed["store"].partition("://")[0] in filled
    code, counted = as_json(capsys, "stats", filled)
    assert (code, counted["objects"], counted["chunks"], counted["remote"]["pending"]) == (0, 6, 3, 0)
    code, report = as_json(capsys, "verify", filled)
    assert (code, report["ok"], report["quarantined"]) == (0, 6, [])


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


def test_a_chunk_is_forgotten_in_a_remote(capsys, filled):
    code, done = as_json(capsys, "forget", filled, "a" * 64)
    assert (code, len(done["removed"]), done["left"]) == (0, 2, [])
    assert {info.chunk_id for info in objects(filled)} == {"b" * 64, "c" * 64}


def test_an_exported_store_goes_from_remote_to_remote(capsys, filled, tmp_path):
    bundle = tmp_path / "bundle"
    code, done = as_json(capsys, "export", filled, bundle, "--chunk", "b" * 64)
    assert (code, done["canonicals"]) == (0, 1)
    target = f"obstore+{(tmp_path / 'other').as_uri()}"
    code, into = as_json(capsys, "import", target, bundle)
    assert (code, into["canonicals"], into["refused"], into["unsaved"]) == (0, 1, [], 0)
    with ChunkStore.open(target) as store:
        assert_same(store.get_canonical(CONTEXT, "b" * 64), canonical("b" * 64))


def test_damage_in_a_remote_is_set_aside_shown_and_deleted(capsys, tmp_path):
    url = f"obstore+{(tmp_path / 'far').as_uri()}"
    with ChunkStore.open(url) as store:
        key = store.put(canonical())
    [blob] = (tmp_path / "far").rglob(key)
    blob.write_bytes(blob.read_bytes()[:-1] + b"!")
    code, report = as_json(capsys, "verify", url)
    assert code == 1 and key in report["quarantined"][0]
    [copy] = as_json(capsys, "quarantine", "ls", url)[1]["copies"]
    assert copy["name"] == key and "digest" in report["quarantined"][0]
    dropped = as_json(capsys, "quarantine", "drop", url, key)[1]
    assert (dropped["dropped"], dropped["copies"]) == (1, [])


def test_a_store_behind_a_cache_is_one_store(capsys, url, tmp_path):
    cache = tmp_path / "cache"
    with ChunkStore.open(url, cache=cache) as store:
        store.put(canonical("a" * 64))
        assert not store.flush(300).unsaved
    with ChunkStore.open(url) as store:
        store.put(canonical("b" * 64))
    assert as_json(capsys, "ls", url, "--cache", cache)[1]["objects"] == 2
    for verb in (("gc", "--max-bytes", "0"), ("forget", "a" * 64)):
        alone = kamera(capsys, "store", verb[0], cache, *verb[1:])
        assert (alone.code, alone.out) == (1, "") and "is the cache of" in alone.err
    assert as_json(capsys, "forget", url, "a" * 64, "--cache", cache)[1]["left"] == []
    assert [info.chunk_id for info in objects(url)] == ["b" * 64]
    assert not list(cache.rglob("*.safetensors"))
    wrong = kamera(capsys, "store", "ls", cache, "--cache", cache)
    assert wrong.code == 2 and "remote" in wrong.err


def test_a_remote_that_is_dead_is_an_error_and_no_empty_store(capsys, tmp_path):
    dead = f"redis+unix://{tmp_path}/none?timeout=0.2&retries=0"
    for verb in VERBS:
        done = kamera(capsys, "store", *verb.split(), dead)
        assert (done.code, done.out) == (1, "") and "does not answer" in done.err, verb
        assert len([line for line in done.err.splitlines() if line.startswith("error:")]) == 1
    assert kamera(capsys, "inspect", dead).code == 1
    assert list(tmp_path.iterdir()) == []


def test_a_remote_that_dies_on_the_way_is_no_shorter_list(capsys, server, monkeypatch):
    with ChunkStore.open(server.url()) as store:
        store.put(canonical())
    census = StoreAdmin.census

    def dies(self, *arguments):
        found = census(self, *arguments)
        server.kill()
        return found

    monkeypatch.setattr(StoreAdmin, "census", dies)
    done = kamera(capsys, "store", "ls", server.url())
    assert (done.code, done.out) == (1, "") and "stopped answering" in done.err


def test_looking_makes_no_folder(capsys, tmp_path):
    done = kamera(capsys, "store", "ls", f"obstore+{(tmp_path / 'none').as_uri()}")
    assert (done.code, done.out) == (1, "") and "not there" in done.err and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", ["memory://", "obstore+memory://", "ftp://host/x", "@/nowhere"])
def test_what_no_other_command_could_open_is_bad_usage(capsys, wrong):
    done = kamera(capsys, "store", "ls", wrong)
    assert done.code == 2 and done.out == ""


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


def test_a_file_url_is_a_directory(capsys, tmp_path):
    with ChunkStore.open(tmp_path / "s") as store:
        store.put(canonical())
    assert as_json(capsys, "ls", (tmp_path / "s").as_uri())[1]["objects"] == 1


def test_inspect_reads_a_remote_and_moves_nothing(capsys, filled, tmp_path):
    done = kamera(capsys, "inspect", filled, "--format", "json")
    assert (done.code, done.document["objects"], done.document["damaged"]) == (0, 6, 0)
    shares = [o["percent_of_kv"] for o in done.document["contents"] if o["kind"] == "exact"]
    assert len(shares) == 3 and all(share > 0 for share in shares)
    assert kamera(capsys, "inspect", filled, "--limit", "2", "--format", "json").document["inspected"] == 2
    if filled.startswith("obstore"):
        blob = next(path for path in (tmp_path / "far").rglob("*") if path.is_file())
        blob.write_bytes(blob.read_bytes()[:-1] + b"!")
        before = files(tmp_path / "far")
        done = kamera(capsys, "inspect", filled, "--format", "json")
        assert (done.code, done.document["damaged"]) == (1, 1) and files(tmp_path / "far") == before


def test_inspect_opens_a_sealed_remote_with_its_secret(capsys, url, tmp_path):
    (tmp_path / "secret").write_bytes(b"s" * 32)
    with ChunkStore.open(url, secret=b"s" * 32) as store:
        store.put(canonical())
        store.put(patch())
    done = kamera(capsys, "inspect", url, "--secret-file", tmp_path / "secret", "--format", "json")
    assert (done.code, done.document["inspected"]) == (0, 2)
    assert all(o["percent_of_kv"] for o in done.document["contents"])
    assert kamera(capsys, "inspect", url, "--format", "json").document["objects"] == 0
    refused = kamera(capsys, "inspect", tmp_path, "--secret-file", tmp_path / "secret")
    assert refused.code == 2 and "for urls" in refused.err
