from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

from resin.models.config import rope_of
from resin.models.rope import Rope, rotate
from resin.plan import InvalidRequest

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


@pytest.mark.parametrize("parameters", [{"rope_type": "spiral"}, {"rope_type": "llama3", "rope_theta": 1e4}])
def test_unknown_or_incomplete_scaling_is_refused(parameters: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match="rope"):
        Rope.from_parameters(parameters, 16)
