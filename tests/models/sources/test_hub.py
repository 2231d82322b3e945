"""Fetching from a hub: what is wanted, what is kept, offline, and an honest message for every refusal."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from resin.models.sources import DownloadError, HubSource
from resin.models.sources import hub as hub_module
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
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "no token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with serving(HubStub(dict(FILES))) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.address)
        yield running


SOURCE = HubSource("owner/model")


def test_wanted_files_arrive_and_the_second_fetch_asks_nothing(stub: HubStub) -> None:
    seen: list[tuple[str, int, int | None]] = []
    assert SOURCE.find() is None
    directory = SOURCE.fetch(lambda *args: seen.append(args))
    assert {path.name for path in directory.iterdir()} == WANTED
    assert all((directory / name).read_bytes() == FILES[name] for name in WANTED)
    total = sum(len(FILES[name]) for name in WANTED)
    assert seen[-1] == ("owner/model", total, total)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    stub.statuses["api"] = [500] * 9
    count = len(stub.requests)
    assert SOURCE.find() == SOURCE.fetch() == directory
    assert len(stub.requests) == count and len(stub.statuses["api"]) == 9


def test_a_model_is_inspected_by_its_config_alone(stub: HubStub, capsys: pytest.CaptureFixture[str]) -> None:
    stub.files["config.json"] = json.dumps(TINY_CONFIGS["lfm2"]).encode()
    assert main(["inspect", "owner/model", "--dtype", "float32"]) == 0
    assert "owner/model: Lfm2" in capsys.readouterr().out
    assert [name for name, _ in stub.requests] == ["config.json"] and SOURCE.find() is None
    stub.files["config.json"] = b"not JSON"
    with pytest.raises(DownloadError, match="cannot be fetched: Expecting value"):
        SOURCE.fetch_config()


def test_other_names_are_taken_where_there_is_no_model_file(stub: HubStub) -> None:
    del stub.files["model.safetensors"]
    directory = SOURCE.fetch()
    assert (directory / "original.safetensors").read_bytes() == FILES["original.safetensors"]
    assert SOURCE.find() == directory


def test_a_cut_connection_is_resumed_where_it_broke(stub: HubStub) -> None:
    piece = 10 * 1024 * 1024  # what the hub's library writes at once
    stub.files["model.safetensors"] = WEIGHTS * 120
    stub.cuts["model.safetensors"] = [piece + 1000]
    assert (SOURCE.fetch() / "model.safetensors").read_bytes() == WEIGHTS * 120
    assert [asked for name, asked in stub.requests if name == "model.safetensors"] == [None, f"bytes={piece}-"]


def test_an_interrupted_fetch_is_not_whole_and_a_later_one_completes_it(stub: HubStub) -> None:
    def interrupt(*_: object) -> None:
        raise ConnectionResetError("the network went away")

    with pytest.raises(DownloadError, match="owner/model: cannot be fetched: the network went away"):
        SOURCE.fetch(interrupt)
    assert SOURCE.find() is None
    assert (SOURCE.fetch() / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize(
    ("status", "reason"),
    [(401, "set HF_TOKEN"), (403, "accept the model's terms"), (404, "check the name and the revision"), (410, "410")],
)
@pytest.mark.parametrize("name", ["api", "model.safetensors"])
def test_refusals_are_explained_and_not_repeated(stub: HubStub, name: str, status: int, reason: str) -> None:
    stub.statuses[name] = [status]
    with pytest.raises(DownloadError, match=f"owner/model: .*{reason}"):
        SOURCE.fetch()
    assert stub.statuses[name] == []


def test_unknown_repositories_and_dead_hubs_are_explained(stub: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DownloadError, match=r"owner/other: not found \(HTTP 404\)"):
        HubSource("owner/other").fetch()
    with pytest.raises(DownloadError, match="owner/a--b: cannot be fetched"):
        HubSource("owner/a--b").fetch()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DownloadError, match="owner/model: the hub cannot be reached"):
        SOURCE.fetch()
    with pytest.raises(DownloadError, match="owner/model: the hub cannot be reached"):
        SOURCE.fetch_config()


def test_a_repository_without_weights_is_refused(stub: HubStub) -> None:
    del stub.files["model.safetensors"], stub.files["original.safetensors"]
    with pytest.raises(DownloadError, match="holds no safetensors weights"):
        SOURCE.fetch()
    assert SOURCE.find() is None


def test_the_token_is_sent_but_never_to_another_host(stub: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    stub.token = "secret"
    with serving(HubStub(dict(FILES))) as elsewhere:
        stub.redirect_to = elsewhere.address
        assert (SOURCE.fetch() / "model.safetensors").read_bytes() == WEIGHTS
        assert elsewhere.tokens == {None}
    assert stub.tokens == {"Bearer secret"}


def test_a_pinned_revision_is_that_commit(stub: HubStub) -> None:
    assert HubSource("owner/model", COMMIT).is_pinned
    assert not SOURCE.is_pinned
    assert HubSource("owner/model", COMMIT).fetch() == SOURCE.fetch()
    for revision in ("f" * 40, "no-such-branch"):
        with pytest.raises(DownloadError, match="check the name and the revision"):
            HubSource("owner/model", revision).fetch()


def test_a_missing_file_makes_a_snapshot_incomplete(stub: HubStub) -> None:
    directory = SOURCE.fetch()
    (directory / "tokenizer.json").unlink()
    assert SOURCE.find() is None
    assert SOURCE.fetch() == directory and (directory / "tokenizer.json").read_bytes() == b"{}"


def test_fetches_at_the_same_time_transfer_once(stub: HubStub) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(SOURCE.fetch())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert sorted(name for name, _ in stub.requests) == sorted(WANTED)


def test_a_full_disk_is_no_connection_fault(stub: HubStub) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(DownloadError, match="cannot be written: No space left on device"):
        SOURCE.fetch(refuse)


def test_an_interrupt_ends_a_transfer(stub: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that waits is interrupted; the transfers see it at their next piece."""
    begun = threading.Event()

    class Waiting:
        def __init__(self, future: object) -> None:
            self.future = future

        def result(self) -> None:
            begun.wait(10)
            raise KeyboardInterrupt

    class Pool(hub_module.ThreadPoolExecutor):
        def submit(self, *args: object, **kwargs: object) -> object:
            return Waiting(super().submit(*args, **kwargs))

    monkeypatch.setattr(hub_module, "ThreadPoolExecutor", Pool)
    stub.files["model.safetensors"] = bytes(200_000_000)
    with pytest.raises(KeyboardInterrupt):
        SOURCE.fetch(lambda *_: begun.set())
    assert SOURCE.find() is None
