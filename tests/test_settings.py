"""Environment variables: defaults, parsing, and an error for a bad value."""

from pathlib import Path

import pytest

from resin.plan import InvalidRequest
from resin.settings import CACHE_DIRECTORY, HUB_ENDPOINT, HUB_TOKEN, SETTINGS


def test_defaults() -> None:
    assert CACHE_DIRECTORY.read({}) == Path.home() / ".cache" / "resin"
    assert CACHE_DIRECTORY.read({"XDG_CACHE_HOME": "/x"}) == Path("/x/resin")
    assert CACHE_DIRECTORY.read({"XDG_CACHE_HOME": "relative"}) == Path.home() / ".cache" / "resin"
    assert HUB_ENDPOINT.read({}) == "https://huggingface.co"
    assert HUB_TOKEN.read({"HF_TOKEN": ""}) is None
    assert len({setting.name for setting in SETTINGS}) == len(SETTINGS)


def test_values() -> None:
    assert CACHE_DIRECTORY.read({"RESIN_CACHE": "~/c"}) == Path.home() / "c"
    assert HUB_ENDPOINT.read({"HF_ENDPOINT": "http://127.0.0.1:80/"}) == "http://127.0.0.1:80"
    assert HUB_TOKEN.read({"HF_TOKEN": "hf_x"}) == "hf_x"


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("RESIN_CACHE", "relative/place", "an absolute directory"),
        ("RESIN_CACHE", "~nobody-at-all/x", "nobody's home"),
        ("RESIN_CACHE", __file__, "a directory, not a file"),
        ("HF_ENDPOINT", "huggingface.co", "an http or https address"),
        ("HF_TOKEN", "two words", "without spaces"),
    ],
)
def test_bad_values_name_variable_value_and_expectation(name: str, value: str, expected: str) -> None:
    setting = next(setting for setting in SETTINGS if setting.name == name)
    with pytest.raises(InvalidRequest, match=expected) as caught:
        setting.read({name: value})
    assert caught.value.field == name


def test_a_user_without_a_home_is_told_which_variable_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", staticmethod(homeless))
    with pytest.raises(InvalidRequest, match="RESIN_CACHE=None: expected an absolute directory"):
        CACHE_DIRECTORY.read({})
    assert CACHE_DIRECTORY.read({"XDG_CACHE_HOME": "/x"}) == Path("/x/resin")
