"""Sampling kernels, interpreted, against the reference, and the reference against NumPy."""

import jax
import numpy as np
import pytest

from resin.pallas_kernels.draw import Draw, gumbel, row_keys, sample_tokens_ref
from resin.pallas_kernels.sampling import choose_tokens, sample_tokens
from resin.pallas_kernels.sampling_general import GENERAL


def build_draw(rows: int, seed: int) -> Draw:
    """Rows of every kind: greedy, plain, each cut alone, and all together."""
    rng = np.random.default_rng(seed)
    kind = np.arange(rows) % 8
    seeds = rng.integers(-(2**31), 2**31, (2, rows)).astype(np.int32)
    return Draw(
        temperature=np.where(kind == 0, 0, 0.8).astype(np.float32),
        top_k=np.where(np.isin(kind, (1, 4, 5, 7)), rng.integers(1, 100, rows), 0).astype(np.int32),
        top_p=np.where(np.isin(kind, (2, 4, 7)), rng.uniform(0.05, 0.6, rows), 1).astype(np.float32),
        min_p=np.where(np.isin(kind, (3, 5, 7)), rng.uniform(0.02, 0.4, rows), 0).astype(np.float32),
        seed_low=seeds[0],
        seed_high=seeds[1],
        positions=rng.integers(0, 10_000, rows).astype(np.int32),
    )


def build_logits(rows: int, vocab: int, *, ties: bool) -> np.ndarray:
    logits = np.random.default_rng(vocab).standard_normal((rows, vocab)).astype(np.float32) * 3
    return np.round(logits) if ties else logits


@pytest.mark.parametrize(("vocab", "ties"), [(3000, True), (20_011, False)])
def test_kernel_matches_the_reference_exactly(vocab, ties):
    logits, draw = build_logits(8, vocab, ties=ties), build_draw(8, vocab)
    np.testing.assert_array_equal(choose_tokens(logits, draw, interpret=True), sample_tokens_ref(logits, draw))


def test_rows_that_do_not_fit_are_reported_and_the_others_unharmed():
    logits, draw = build_logits(8, 20_011, ties=False), build_draw(8, 1)
    logits[1] = 0.0  # all equal: every span reaches the threshold
    logits[2] /= 100  # a nucleus of half the vocabulary
    draw = draw._replace(top_k=draw.top_k.copy())
    draw.top_k[4] = 5000
    out, reference = np.asarray(choose_tokens(logits, draw, interpret=True)), sample_tokens_ref(logits, draw)
    fits = np.array([True, False, False, True, False, True, True, True])
    np.testing.assert_array_equal(out == GENERAL, ~fits)
    np.testing.assert_array_equal(out[fits], reference[fits])
    np.testing.assert_array_equal(sample_tokens(logits, draw, interpret=True), reference)


def test_few_tokens_and_forbidden_ones():
    logits, draw = build_logits(16, 100, ties=True), build_draw(16, 2)
    np.testing.assert_array_equal(choose_tokens(logits, draw, interpret=True), sample_tokens_ref(logits, draw))
    logits[:, 7:] = -np.inf
    for tokens in (choose_tokens(logits, draw, interpret=True), sample_tokens_ref(logits, draw)):
        assert np.all((np.asarray(tokens) >= 0) & (np.asarray(tokens) < 7))


def test_draws_depend_on_seed_and_position_alone():
    logits, draw = build_logits(8, 3000, ties=False), build_draw(8, 3)
    together = np.asarray(choose_tokens(logits, draw, interpret=True))
    turned = np.asarray(
        choose_tokens(logits[::-1].copy(), Draw(*(column[::-1].copy() for column in draw)), interpret=True)
    )
    np.testing.assert_array_equal(together, turned[::-1])


def test_reference_cuts_match_numpy():
    vocab, rows = 400, 64
    logits, draw = build_logits(rows, vocab, ties=True), build_draw(rows, 4)
    tokens = np.asarray(sample_tokens_ref(logits, draw))
    noise = np.asarray(gumbel(row_keys(draw.seed_low, draw.seed_high, draw.positions)[:, None], np.arange(vocab)[None]))
    for row in range(rows):
        if draw.temperature[row] == 0:
            assert tokens[row] == np.argmax(logits[row])
            continue
        scaled = (logits[row] / draw.temperature[row]).astype(np.float64)
        order = np.lexsort((np.arange(vocab), -scaled))
        kept = order[: draw.top_k[row] or vocab]
        mass = np.exp(scaled[kept] - scaled[order[0]])
        reached = np.cumsum(mass) - mass < draw.top_p[row] * mass.sum() if draw.top_p[row] < 1 else mass > -1
        kept = kept[reached & (mass >= draw.min_p[row])]
        assert tokens[row] == kept[np.argmax((logits[row] / draw.temperature[row] + noise[row])[kept])]


def test_noise_is_standard_gumbel():
    key = row_keys(np.array([5], np.int32), np.array([0], np.int32), np.array([9], np.int32))
    noise = np.asarray(jax.jit(gumbel)(key[:, None], np.arange(200_000)[None]))[0]
    assert abs(noise.mean() - np.euler_gamma) < 0.01
    assert abs(noise.var() - np.pi**2 / 6) < 0.02
