"""The router, interpreted, against its reference and against float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from resin.pallas_kernels.dense_tiles import DenseTiles, choose_route_tiles
from resin.pallas_kernels.route import RouteRule, route_tokens, route_tokens_ref
from resin.plan import InvalidRequest

EPS = 1e-5
SHAPES = [
    (1, 60, 8),
    (1, 128, 1),
    (2, 5, 5),
    (3, 128, 8),
    (16, 5, 2),
    (16, 60, 4),
    (33, 60, 7),
    (33, 128, 3),
    (3, 60, 12),
]
RULES = [
    RouteRule(1),
    RouteRule(1, renormalise=True),
    RouteRule(1, "sigmoid"),
    RouteRule(1, "sigmoid", renormalise=True, scaling=2.5, sum_eps=0.5),
]
# Half of all pairs, each shape with two rules and each rule with every other shape; the others are slow.
PAIRS = [
    pytest.param(shape, rule, id=f"{shape}-{rule}", marks=pytest.mark.slow if (place + number) % 2 else ())
    for place, shape in enumerate(SHAPES)
    for number, rule in enumerate(RULES)
]
FUNCTIONS = {"kernel": functools.partial(route_tokens, interpret=True), "reference": route_tokens_ref}


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def rule_of(rule: RouteRule, top_k: int) -> RouteRule:
    return dataclasses.replace(rule, top_k=top_k)


def expected_choice(scores: np.ndarray, rule: RouteRule, selection_bias: np.ndarray | None):
    """ids and weights of float64 scores."""
    if rule.share == "sigmoid":
        shares = 1 / (1 + np.exp(-scores))
    else:
        shares = np.exp(scores - scores.max(1, keepdims=True))
        shares = shares / shares.sum(1, keepdims=True)
    ranked = shares if selection_bias is None else shares + selection_bias
    ids = np.argsort(-ranked, axis=1, kind="stable")[:, : rule.top_k]
    weights = np.take_along_axis(shares, ids, axis=1)
    if rule.renormalise:
        weights = weights / (weights.sum(1, keepdims=True) + (rule.sum_eps if rule.share == "sigmoid" else 0))
    return ids, weights * rule.scaling


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(("shape", "rule"), PAIRS)
def test_matches_float64(shape, rule, name):
    tokens, experts, top_k = shape
    rule, inner = rule_of(rule, top_k), 200
    x, gate, norm = 3 * normal(1, tokens, inner), normal(2, inner, experts) / 8, normal(3, inner)
    bias = normal(4, experts)
    selection_bias = normal(5, experts) if rule.share == "sigmoid" else None
    norm = norm if experts != 60 else None
    call = functools.partial(FUNCTIONS[name], rule=rule, eps=EPS)
    ids, weights, normed, _ = jax.jit(call)(x, gate, norm=norm, bias=bias, selection_bias=selection_bias)
    assert ids.dtype == jnp.int32 and weights.dtype == jnp.float32 and ids.shape == (tokens, top_k)
    wide = x.astype(np.float64)
    if norm is not None:
        wide = wide / np.sqrt((wide**2).mean(1, keepdims=True) + EPS) * norm
    expected_ids, expected = expected_choice(wide @ gate.astype(np.float64) + bias, rule, selection_bias)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected, rtol=2e-5)
    np.testing.assert_allclose(normed.whole(), wide, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 3])
def test_equal_scores_take_the_lowest_expert(rows):
    x = np.eye(rows, 16, dtype=np.float32)
    gate = np.random.default_rng(0).integers(0, 3, (16, 60)).astype(np.float32)
    ids, *_ = FUNCTIONS["kernel"](x, gate, rule=RouteRule(8))
    np.testing.assert_array_equal(ids, jax.lax.top_k(gate[:rows], 8)[1])


@pytest.mark.parametrize("rule", [RouteRule(4), RouteRule(4, "sigmoid", renormalise=True)], ids=str)
def test_scores_that_are_no_numbers_choose_distinct_experts(rule):
    x, gate = normal(1, 3, 32), normal(2, 32, 6)
    x[1] = np.nan
    gate[:, 4] = np.nan
    bias = np.array([0, 0, 0, -np.inf, 0, np.inf], np.float32)
    ids = np.asarray(FUNCTIONS["kernel"](x, gate, rule=rule, bias=bias)[0])
    assert all(len(set(row)) == 4 for row in ids.tolist()) and ids.min() >= 0 and ids.max() < 6
    assert 4 in ids[0, :2]
    np.testing.assert_array_equal(ids[1], [0, 1, 2, 3])


def test_more_experts_than_finite_scores_are_distinct():
    bias = np.full(5, -np.inf, np.float32)
    bias[2] = 0
    ids, weights, *_ = FUNCTIONS["kernel"](normal(1, 3, 32), normal(2, 32, 5), rule=RouteRule(3), bias=bias)
    np.testing.assert_array_equal(ids, [[2, 0, 1]] * 3)
    np.testing.assert_array_equal(weights, [[1, 0, 0]] * 3)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("live", [(1, 0), (1, 1, 0), (0, 1, 0), (1, 1, 1)])
def test_padding_takes_no_expert_wherever_it_is(live, name):
    rows, held = len(live), np.array(live, np.bool_)
    x, gate, rule = normal(1, rows, 32), normal(2, 32, 12), RouteRule(4)
    own, own_weights, *_ = FUNCTIONS[name](x, gate, rule=rule)
    ids, weights, *_ = FUNCTIONS[name](x, gate, rule=rule, live=jnp.array(live, jnp.int32))
    np.testing.assert_array_equal(ids, np.where(held[:, None], own, -1))
    np.testing.assert_array_equal(weights[held], own_weights[held])


@pytest.mark.parametrize(
    "tiles",
    [
        DenseTiles(64, 16, splits=8, vector=True),
        DenseTiles(64, 32, splits=3, vector=True),
        DenseTiles(64, 16, splits=4),
        DenseTiles(64, 32),
    ],
    ids=str,
)
def test_tiles_change_nothing_and_counters_come_back_as_zeros(tiles):
    x, gate, norm, rule = normal(1, 2, 100), normal(2, 100, 60), normal(3, 100), RouteRule(6, renormalise=True)
    counters = jnp.zeros(3, jnp.int32)
    ids, weights, normed, counters = FUNCTIONS["kernel"](x, gate, rule=rule, norm=norm, tiles=tiles, counters=counters)
    expected_ids, expected, expected_normed, _ = route_tokens_ref(x, gate, rule=rule, norm=norm)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected, rtol=1e-5)
    np.testing.assert_allclose(normed.whole(), expected_normed.x, rtol=1e-5)
    assert not np.any(counters)


@pytest.mark.parametrize("experts", [5, 32, 60, 128, 256])
@pytest.mark.parametrize("inner", [64, 2048, 2880])
@pytest.mark.parametrize("rows", [1, 2, 3, 16, 33, 64])
def test_chosen_tiles_cover_the_product_in_one_block(rows, inner, experts):
    tiles = choose_route_tiles(rows, inner, experts)
    assert tiles.block_columns >= experts and 1 <= tiles.splits <= 32
    assert inner < 2048 or tiles.splits >= 8


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    ("rule", "options", "message"),
    [
        (RouteRule(9), {}, "top_k=9: expected 1 to 8"),
        (RouteRule(0), {}, "top_k=0: expected 1 to 8"),
        (RouteRule(2, "tanh"), {}, "share='tanh': expected one of"),
        (RouteRule(2), {"selection_bias": np.zeros(8, np.float32)}, "selection_bias=True: expected None"),
    ],
)
def test_rules_that_cannot_be_followed_are_refused(rule, options, message, name):
    with pytest.raises(InvalidRequest, match=message):
        FUNCTIONS[name](normal(1, 2, 16), normal(2, 16, 8), rule=rule, **options)
