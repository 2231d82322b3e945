"""Fetching from a hub: resumption, verification and an honest message for every refusal."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from resin.models.sources import DownloadError, HubSource
from resin.models.sources import transfer as transfer_module
from resin.models.sources.cache import is_complete
from resin.models.testing import TINY_CONFIGS
from serve.cli import main
from tests.models.sources.hub_stub import COMMIT, HubStub, serving

WEIGHTS = bytes(range(256)) * 400
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": WEIGHTS,
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"hello",
    "README.md": b"not wanted",
    "original.safetensors": b"a second copy",
    "original/params.json": b"{}",
}
WANTED = {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStub]:
    monkeypatch.setenv("RESIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(transfer_module, "_FIRST_PAUSE_S", 0.001)
    with serving(HubStub(dict(FILES))) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.address)
        yield running


SOURCE = HubSource("owner/model")


def test_wanted_files_arrive_and_the_second_fetch_asks_nothing(stub: HubStub) -> None:
    seen: list[tuple[str, int, int | None]] = []
    assert SOURCE.find() is None
    directory = SOURCE.fetch(lambda *args: seen.append(args))
    assert {path.name for path in directory.iterdir() if not path.name.startswith(".")} == WANTED
    assert all((directory / name).read_bytes() == FILES[name] for name in WANTED)
    total = sum(len(FILES[name]) for name in WANTED)
    assert seen[-1] == ("owner/model", total, total)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    count = len(stub.requests)
    stub.statuses["api"] = [500]
    assert SOURCE.find() == SOURCE.fetch() == directory
    assert len(stub.requests) == count


def test_a_model_is_inspected_by_its_config_alone(stub: HubStub, capsys: pytest.CaptureFixture[str]) -> None:
    stub.files["config.json"] = json.dumps(TINY_CONFIGS["lfm2"]).encode()
    assert main(["inspect", "owner/model", "--dtype", "float32"]) == 0
    assert "owner/model: Lfm2" in capsys.readouterr().out
    assert [name for name, _, _ in stub.requests] == ["config.json"] and SOURCE.find() is None
    # What has been fetched is read from this machine.
    SOURCE.fetch()
    stub.statuses["config.json"] = [500]
    with pytest.raises(DownloadError, match="HTTP 500"):
        SOURCE.fetch_config()


def test_a_cut_connection_is_resumed_where_it_broke(stub: HubStub) -> None:
    stub.cuts["model.safetensors"] = [1000, 500]
    directory = SOURCE.fetch()
    assert (directory / "model.safetensors").read_bytes() == WEIGHTS
    ranges = [asked for name, asked, _ in stub.requests if name == "model.safetensors"]
    assert ranges == [None, "bytes=1000-", "bytes=1500-"]


def test_a_server_without_ranges_starts_over(stub: HubStub) -> None:
    stub.honours_range = False
    stub.cuts["model.safetensors"] = [1000]
    assert (SOURCE.fetch() / "model.safetensors").read_bytes() == WEIGHTS


def test_an_interrupted_fetch_is_not_whole_and_a_later_one_resumes(stub: HubStub) -> None:
    stub.cuts["model.safetensors"] = [100] * 5
    with pytest.raises(DownloadError, match=r"model\.safetensors: .*5 times; what arrived is kept"):
        SOURCE.fetch()
    assert SOURCE.find() is None
    snapshot = SOURCE.directory / COMMIT
    assert (snapshot / "model.safetensors.part").stat().st_size == 500
    assert not (snapshot / "model.safetensors").exists()
    assert not is_complete(snapshot)
    SOURCE.fetch()
    assert ("model.safetensors", "bytes=500-", None) in stub.requests
    assert (snapshot / "model.safetensors").read_bytes() == WEIGHTS


def test_a_part_longer_than_the_file_is_thrown_away(stub: HubStub) -> None:
    part = SOURCE.directory / COMMIT / "model.safetensors.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"x" * (len(WEIGHTS) + 1))
    assert (SOURCE.fetch() / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_wrong_bytes_are_deleted_and_named(stub: HubStub, name: str) -> None:
    stub.wrong_sums.add(name)
    with pytest.raises(DownloadError, match=f"{name}: .* expected 1+; the bytes are deleted"):
        SOURCE.fetch()
    assert SOURCE.find() is None
    assert not list((SOURCE.directory / COMMIT).glob(f"{name}*"))
    stub.wrong_sums.clear()
    assert (SOURCE.fetch() / name).read_bytes() == FILES[name]


def test_a_damaged_part_is_caught_by_the_checksum(stub: HubStub) -> None:
    part = SOURCE.directory / COMMIT / "model.safetensors.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"y" * 300)
    with pytest.raises(DownloadError, match="sha256 is"):
        SOURCE.fetch()
    assert (SOURCE.fetch() / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize(
    ("status", "reason"),
    [(401, "set HF_TOKEN"), (403, "accept the model's terms"), (404, "check the name and the revision"), (410, "410")],
)
@pytest.mark.parametrize("name", ["api", "model.safetensors"])
def test_refusals_are_explained_and_not_repeated(stub: HubStub, name: str, status: int, reason: str) -> None:
    stub.statuses[name] = [status]
    with pytest.raises(DownloadError, match=reason):
        SOURCE.fetch()
    assert stub.statuses[name] == []


def test_passing_faults_are_tried_again(stub: HubStub) -> None:
    stub.statuses["model.safetensors"] = [503, 429, 500]
    assert (SOURCE.fetch() / "model.safetensors").read_bytes() == WEIGHTS


def test_unknown_repositories_and_dead_hubs_are_explained(stub: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DownloadError, match=r"owner/other: not found \(HTTP 404\)"):
        HubSource("owner/other").fetch()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DownloadError, match="owner/model: the hub cannot be reached"):
        SOURCE.fetch()


def test_a_repository_without_weights_is_refused(stub: HubStub) -> None:
    del stub.files["model.safetensors"], stub.files["original.safetensors"]
    with pytest.raises(DownloadError, match="holds no safetensors weights"):
        SOURCE.fetch()


def test_the_token_is_sent_but_never_to_another_host(stub: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    stub.token = "secret"
    with serving(HubStub(dict(FILES))) as elsewhere:
        stub.redirect_to = elsewhere.address
        assert (SOURCE.fetch() / "model.safetensors").read_bytes() == WEIGHTS
        assert {authorization for _, _, authorization in elsewhere.requests} == {None}
    assert {authorization for _, _, authorization in stub.requests} == {"Bearer secret"}


def test_a_pinned_revision_must_be_what_the_hub_offers(stub: HubStub) -> None:
    assert HubSource("owner/model", COMMIT).is_pinned
    assert not SOURCE.is_pinned
    assert HubSource("owner/model", COMMIT).fetch() == SOURCE.fetch()
    with pytest.raises(DownloadError, match="asked for commit f"):
        HubSource("owner/model", "f" * 40).fetch()


def test_a_truncated_or_missing_file_makes_a_snapshot_incomplete(stub: HubStub) -> None:
    directory = SOURCE.fetch()
    (directory / "model.safetensors").write_bytes(WEIGHTS[:-1])
    assert SOURCE.find() is None
    assert (SOURCE.fetch() / "model.safetensors").read_bytes() == WEIGHTS
    (directory / "tokenizer.json").unlink()
    assert SOURCE.find() is None
    (directory / ".complete.json").write_text("{")
    assert not is_complete(directory)


def test_fetches_at_the_same_time_transfer_once(stub: HubStub) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(SOURCE.fetch())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert sorted(name for name, _, _ in stub.requests) == sorted(WANTED)


def test_a_full_disk_is_no_connection_fault(stub: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(transfer_module, "_append", refuse)
    with pytest.raises(DownloadError, match="cannot be written: No space left on device"):
        SOURCE.fetch()
