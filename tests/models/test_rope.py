from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

from resin.models.config import rope_of
from resin.models.rope import Rope, rotate
from resin.plan import InvalidRequest

LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}


def test_rotation_turns_half_split_pairs() -> None:
    rope = Rope.from_parameters({"rope_theta": 100.0}, 4)
    x = np.random.default_rng(0).standard_normal((3, 2, 4)).astype(np.float32)
    positions = np.array([0, 5, 9])
    out = np.asarray(rotate(jnp.asarray(x), rope.rotation(jnp.asarray(positions, jnp.int32))))
    for i, frequency in enumerate((1.0, 0.1)):
        turn = np.exp(1j * positions * frequency)[:, None]
        pair = (x[..., i] + 1j * x[..., i + 2]) * turn
        np.testing.assert_allclose(out[..., i], pair.real, atol=1e-6)
        np.testing.assert_allclose(out[..., i + 2], pair.imag, atol=1e-6)


def test_llama3_scaling_keeps_fast_pairs_and_slows_slow_ones() -> None:
    parameters = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    plain = np.array(Rope.from_parameters({"rope_theta": 5e5}, 128).frequencies)
    scaled = np.array(Rope.from_parameters(parameters, 128).frequencies)
    for before, after in zip(plain, scaled, strict=True):
        length = 2 * math.pi / before
        if length > 8192 / 1.0:
            expected = before / 8
        elif length < 8192 / 4.0:
            expected = before
        else:
            s = (8192 / length - 1) / 3
            expected = (1 - s) * before / 8 + s * before
        assert after == pytest.approx(expected, rel=1e-12)


def test_yarn_interpolates_between_its_edges() -> None:
    rope = Rope.from_parameters(YARN, 32)
    plain = np.array(Rope.from_parameters({"rope_theta": 1e4}, 32).frequencies)
    ratio = plain / np.array(rope.frequencies)
    assert ratio[0] == pytest.approx(1) and ratio[-1] == pytest.approx(8)
    assert (np.diff(ratio) >= -1e-12).all()
    assert rope.factor == pytest.approx(0.1 * math.log(8) + 1)
    assert Rope.from_parameters({**YARN, "attention_factor": 1.25}, 32).factor == 1.25
    # gpt-oss: cos and sin times 1.34657.
    assert Rope.from_parameters({**YARN, "factor": 32.0}, 32).factor == pytest.approx(1.34657, abs=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("share", [0.5, 0.75, 1.0])
def test_a_rotation_of_some_lanes_is_one_of_halves_with_the_lanes_in_another_order(
    share: float, interleaved: bool
) -> None:
    width, turning = 16, int(16 * share)
    parameters = {"rope_theta": 100.0, "partial_rotary_factor": share}
    rope = Rope.from_parameters(parameters, width, partial=1.0, interleaved=interleaved)
    x = np.random.default_rng(0).standard_normal((5, 3, width)).astype(np.float32)
    positions = np.array([0, 1, 5, 9, 300])
    expected = x.copy()
    for pair in range(turning // 2):
        places = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + turning // 2)
        turn = np.exp(1j * positions * 100.0 ** (-2 * pair / turning))[:, None]
        turned = (x[..., places[0]] + 1j * x[..., places[1]]) * turn
        expected[..., places[0]], expected[..., places[1]] = turned.real, turned.imag
    lanes = list(range(width)) if rope.lanes is None else list(rope.lanes)
    assert sorted(lanes) == list(range(width)) and (rope.lanes is None) == (share == 1 and not interleaved)
    out = rotate(jnp.asarray(x[..., lanes]), rope.rotation(jnp.asarray(positions, jnp.int32)))
    np.testing.assert_allclose(np.asarray(out), expected[..., lanes], atol=1e-4)


def test_lanes_that_stand_still_are_left_as_they_are() -> None:
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 2, 8)), jnp.float32)
    positions = jnp.array([0, 3, 77, 100_000])
    np.testing.assert_array_equal(rotate(x, Rope.still(8).rotation(positions)), x)
    yarn = Rope.from_parameters({**YARN, "partial_rotary_factor": 0.5}, 8, partial=1.0)
    assert yarn.factor > 1
    rotated = rotate(x, yarn.rotation(positions))
    still = [place for place, frequency in enumerate(yarn.frequencies * 2) if frequency == 0]
    np.testing.assert_array_equal(rotated[..., still], x[..., still])


@pytest.mark.parametrize("share", [0.1, 0.2, 0, 1.5])
def test_a_share_that_is_no_whole_pair_is_refused(share: float) -> None:
    with pytest.raises(InvalidRequest, match="partial_rotary_factor"):
        Rope.from_parameters({"rope_theta": 1e4, "partial_rotary_factor": share}, 16, partial=0.5)


def test_dynamic_scaling_begins_beyond_the_longest_sequence() -> None:
    parameters = {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 4.0}
    assert Rope.from_parameters(parameters, 16) == Rope.from_parameters({"rope_theta": 1e4}, 16)
    with pytest.raises(InvalidRequest, match="factor"):
        Rope.from_parameters({**parameters, "factor": 0.5}, 16)


def test_proportional_leaves_the_last_pairs_alone() -> None:
    rope = Rope.from_parameters({"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5}, 16)
    assert rope.frequencies[4:] == (0.0,) * 4
    assert rope.frequencies[1] == pytest.approx(1e6 ** (-2 / 16))


def test_config_spellings_agree() -> None:
    old = {"rope_theta": 5e5, "max_position_embeddings": 64, "rope_scaling": {"type": "linear", "factor": 4.0}}
    new = {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}}
    labelled = {"rope_parameters": {"full": new["rope_parameters"], "sliding": {"rope_theta": 1e4}}}
    assert rope_of(old, 16) == rope_of(new, 16) == rope_of(labelled, 16, "full")
    assert rope_of(labelled, 16, "sliding") == rope_of({"rope_theta": 1e4}, 16)


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"rope_type": "spiral"}, "rope_type"),
        ({"rope_type": "llama3"}, "factor"),
        ({"rope_type": "linear", "factor": 0.5}, "factor"),
        ({"rope_type": "linear", "factor": "4"}, "factor"),
        ({"rope_type": "linear", "factor": 4.0, "long_factor": [1.0]}, "long_factor"),
        ({**YARN, "original_max_position_embeddings": None}, "original_max_position_embeddings"),
        ({**YARN, "truncate": 0}, "truncate"),
        ({"full_attention": {"rope_theta": 5e5}}, "full_attention"),
        *(({**rope, "partial_rotary_factor": 0.5}, "partial_rotary_factor") for rope in (YARN, LLAMA3, LINEAR, {})),
    ],
)
def test_a_rotation_is_refused_by_the_field_that_is_wrong(parameters: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Rope.from_parameters({"rope_theta": 1e4, **parameters}, 16)
    assert caught.value.field == field


SCALED = {name: value for name, value in YARN.items() if name != "rope_theta"}
# Frequencies 1 and 7 of 16 and the factor: what LlamaRotaryEmbedding of transformers 5.24 makes of these settings.
AS_TRANSFORMERS = [
    # The older name wins over the newer one, and the length beside it over the one inside.
    ({"rope_scaling": LINEAR, "rope_parameters": {"rope_theta": 5e5}, "rope_theta": 1e3}, 0.162345409, 0.0121741882, 1),
    ({"rope_scaling": SCALED, "original_max_position_embeddings": 32}, 0.398325086, 0.00222284929, 1.20794415),
    ({"rope_scaling": LLAMA3, "original_max_position_embeddings": 32}, 0.376015753, 0.00222284929, 1),
    (
        {"rope_parameters": {**LLAMA3, "rope_theta": 3e4}, "original_max_position_embeddings": 256, "rope_theta": 7.0},
        0.525024951,
        0.00137457834,
        1,
    ),
    ({"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0}}, 0.463931590, 0.00222284929, 0.948355852),
    ({"rope_parameters": {"type": "linear", "factor": 2.0}, "rope_theta": 2e4}, 0.269249946, 0.0065655238, 1),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 0.502090454, 0.00444569858, 1.13862944),
    (
        {"rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 3e4}},
        0.525024951,
        0.0109966266,
        1,
    ),
]


LONGROPE = {
    "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 4.0, 8.0, 16.0]},
    "original_max_position_embeddings": 32,
    "partial_rotary_factor": 0.5,
}


def test_longrope_goes_by_the_longest_sequence_that_is_served() -> None:
    rope = rope_of({"max_position_embeddings": 256, **LONGROPE}, 16, partial=1.0)
    # What Phi3RotaryEmbedding of transformers 5.24 makes of it, up to 32 tokens and beyond.
    short, long = (1.0, 0.0666666701, 0.00499999989, 0.000333333330), (0.5, 0.025, 0.00125, 0.0000625)
    assert rope.factor == pytest.approx(1.26491106, rel=1e-6)
    for context, expected in ((0, short), (32, short), (33, long), (256, long)):
        cos, sin = rope.rotation(jnp.array([7], jnp.int32), context)
        np.testing.assert_allclose(cos[0, :4], rope.factor * np.cos(7 * np.array(expected)), atol=1e-6)
        np.testing.assert_allclose(sin[0, :4], rope.factor * np.sin(7 * np.array(expected)), atol=1e-6)
        np.testing.assert_array_equal(np.stack([cos, sin])[:, 0, 4:], [[1] * 4, [0] * 4])


def test_longrope_takes_its_factor_from_the_config_first() -> None:
    scaling = {**LONGROPE["rope_scaling"], "factor": 4.0}  # type: ignore[dict-item]
    given = {"max_position_embeddings": 256, **LONGROPE, "rope_scaling": scaling}
    assert rope_of(given, 16, partial=1.0).factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(32)))
    exact = {**given, "rope_scaling": {**scaling, "attention_factor": 1.5}}
    assert rope_of(exact, 16, partial=1.0).factor == 1.5
    assert rope_of({**LONGROPE, "max_position_embeddings": 32}, 16, partial=1.0).factor == 1


@pytest.mark.parametrize("name", ["short_factor", "long_factor"])
@pytest.mark.parametrize("value", [None, 1.0, [1.0] * 3, [1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, "2"]])
def test_factors_of_longrope_that_do_not_fit_are_refused(name: str, value: object) -> None:
    scaling = {**LONGROPE["rope_scaling"], name: value}  # type: ignore[dict-item]
    with pytest.raises(InvalidRequest, match=rf"rope_scaling\.{name}="):
        rope_of({"max_position_embeddings": 256, **LONGROPE, "rope_scaling": scaling}, 16, partial=1.0)


@pytest.mark.parametrize(("config", "second", "eighth", "factor"), AS_TRANSFORMERS)
def test_configs_are_read_as_transformers_reads_them(
    config: dict[str, object], second: float, eighth: float, factor: float
) -> None:
    rope = rope_of({"max_position_embeddings": 256, **config}, 32)
    found = (rope.frequencies[1], rope.frequencies[7], rope.factor)
    assert found == pytest.approx((second, eighth, factor), rel=1e-6)


@pytest.mark.parametrize("width", [0, 1, 7])
def test_only_pairs_turn(width: int) -> None:
    with pytest.raises(InvalidRequest, match="head_dim"):
        Rope.from_parameters({"rope_theta": 1e4}, width)
