"""8-bit keys and values: the bytes of the arena, and every kernel that writes or reads them."""

import functools

import jax
import ml_dtypes
import numpy as np
import pytest

from resin.pallas_kernels.fp8 import pack_fp8, unpack_fp8
from resin.pallas_kernels.paged_decode import DecodeTiles, paged_decode_attention
from resin.pallas_kernels.paged_prefill import PrefillTiles, paged_prefill_attention
from resin.pallas_kernels.paged_ref import paged_decode_attention_ref, paged_prefill_attention_ref
from resin.pallas_kernels.rope_append import rope_append
from resin.plan import InvalidRequest
from tests.pallas_kernels.paged_cases import build_case, dense_attention, fp8_case, relative_error
from tests.pallas_kernels.references import rope_append_ref
from tests.pallas_kernels.test_paged_attention import LENGTHS, options, run_decode, run_prefill
from tests.pallas_kernels.test_rope_append import build

FP8 = ml_dtypes.float8_e4m3fn
# heads, kv_heads, width, page_entries, window, sinks, softcap, scale
SHAPES = [
    (9, 3, 64, 16, None, False, None, 1.0),
    (4, 4, 80, 8, 20, True, None, 0.5),
    pytest.param((7, 1, 128, 16, 5, True, 30.0, 0.01), marks=pytest.mark.slow),
    pytest.param((4, 2, 256, 24, 100, False, 50.0, 3.0), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("dtype", ["uint16", "bfloat16", "float32", "uint32", "uint8"])
def test_every_byte_comes_back_from_its_place(dtype):
    values = np.arange(256, dtype=np.uint8).view(FP8).astype(np.float32)
    values = np.stack([values, np.random.default_rng(0).permutation(values)])
    packed = np.asarray(jax.jit(functools.partial(pack_fp8, dtype=dtype, scale=1.0))(values))
    assert str(packed.dtype) == dtype
    count = packed.dtype.itemsize
    held = packed.view(np.uint8).reshape(2, -1, count).transpose(0, 2, 1).reshape(2, 256)
    np.testing.assert_array_equal(held.view(FP8).astype(np.float32), values)
    np.testing.assert_array_equal(jax.jit(functools.partial(unpack_fp8, scale=1.0))(packed), values)


def round_trip(values: list[float], scale: float) -> np.ndarray:
    held = np.array(values, np.float32)
    return np.asarray(jax.jit(lambda held: unpack_fp8(pack_fp8(held, "uint16", scale), scale))(held))


def test_values_saturate_round_to_even_and_keep_their_sign():
    values = [1e9, -1e9, 448, 463, 465, 479, np.inf, -np.inf, -0.0, 17, 19, 2**-10, 3 * 2**-11, np.nan]
    got = round_trip(values, 1.0)
    np.testing.assert_array_equal(got, [448, -448, 448, 448, 448, 448, 448, -448, -0.0, 16, 20, 0, 2**-9, np.nan])
    assert np.signbit(got[8])


def test_the_scale_moves_the_range():
    np.testing.assert_allclose(round_trip([1000, -3000, 0.001, 5], 8.0), [1024, -3072, 0, 5], rtol=0, atol=0.02)


def test_vectors_of_broken_elements_are_refused():
    with pytest.raises(InvalidRequest, match="width=6: expected a multiple of 4"):
        pack_fp8(np.zeros((3, 6), np.float32), "float32", 1.0)
    case = fp8_case(build_case([5], [1], heads=2, kv_heads=1, width=64, page_entries=8), 1.0, 4)
    with pytest.raises(InvalidRequest, match="uint16"):
        run_decode(case, paged_decode_attention, {"fp8_scale": 1.0}, interpret=True)


@pytest.mark.parametrize("element_bytes", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("shape", SHAPES)
def test_references_match_dense_attention_of_rounded_values(shape, element_bytes):
    heads, kv_heads, width, entries, window, sinks, softcap, scale = shape
    sizes = {"heads": heads, "kv_heads": kv_heads, "width": width, "page_entries": entries, "window": window}
    for function, run, queries in (
        (paged_decode_attention_ref, run_decode, [1] * 5),
        (paged_prefill_attention_ref, run_prefill, [1, 10, 40, 5, 1]),
    ):
        case = fp8_case(build_case(LENGTHS, queries, **sizes), scale, element_bytes)
        chosen = options(case, window, sinks, softcap)
        out, *_ = run(case, function, {**chosen, "fp8_scale": scale})
        assert relative_error(out, dense_attention(case, **chosen)) < 1e-6


@pytest.mark.parametrize("splits", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_decode_kernel_matches_dense_attention_of_rounded_values(shape, splits):
    heads, kv_heads, width, entries, window, sinks, softcap, scale = shape
    case = build_case(
        LENGTHS, [1] * 5, heads=heads, kv_heads=kv_heads, width=width, page_entries=entries, window=window
    )
    case = fp8_case(case, scale)
    chosen = options(case, window, sinks, softcap)
    out, _ = run_decode(
        case,
        paged_decode_attention,
        {**chosen, "fp8_scale": scale},
        tiles=DecodeTiles(32, splits),
        interpret=True,
    )
    assert relative_error(out, dense_attention(case, **chosen)) < 1e-6


@pytest.mark.parametrize("shape", SHAPES)
def test_prefill_kernel_matches_dense_attention_of_rounded_values(shape):
    heads, kv_heads, width, entries, window, sinks, softcap, scale = shape
    sizes = {"heads": heads, "kv_heads": kv_heads, "width": width, "page_entries": entries, "window": window}
    case = fp8_case(build_case(LENGTHS, [1, 10, 40, 5, 1], padding_tokens=3, **sizes), scale)
    chosen = options(case, window, sinks, softcap)
    tiles = PrefillTiles(64, 32, parts=2)
    out, _ = run_prefill(case, paged_prefill_attention, {**chosen, "fp8_scale": scale}, tiles=tiles, interpret=True)
    live = case.query_indptr[-1]
    assert relative_error(out[:live], dense_attention(case, **chosen)[:live]) < 1e-6


@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("shape", [(1, 4, 2, 64, 8, True), (70, 7, 1, 80, 16, False)])
def test_append_writes_the_bytes_and_nothing_else(shape, scale):
    arguments, call = build(*shape)
    x, cos, sin, wide, *places = arguments
    # A multiple of the scale, so that no rotation's last bit decides a rounding: whole numbers and quarter turns.
    x = np.round(8 * x)
    cos, sin = np.zeros_like(cos), np.ones_like(sin)
    arena = np.full((wide.shape[0], wide.shape[1] // 2), 0xFFFF, np.uint16)
    call = {name: value for name, value in call.items() if not name.endswith("norm")} | {"fp8_scale": scale}
    results = [
        jax.jit(functools.partial(function, **call))(x, cos, sin, arena, *places)
        for function in (functools.partial(rope_append, interpret=True), rope_append_ref)
    ]
    for out, expected in zip(*results, strict=True):
        np.testing.assert_array_equal(out, expected)
    tokens, heads, kv_heads, width = shape[:4]
    held = np.asarray(results[0][1])
    assert np.count_nonzero(held != 0xFFFF) == tokens * 2 * kv_heads * width // 2
    page, offset, value_row = places[0][0], places[1][0], places[3]
    row = held.reshape(len(held), -1, width // 2)[page, value_row + offset]
    vector = x[0, heads // kv_heads + 1]
    # The second half of a vector lies in the upper bytes.
    expected = np.clip(vector / scale, -448, 448).astype(FP8).view(np.uint8).astype(np.uint16)
    np.testing.assert_array_equal(row, expected[: width // 2] | expected[width // 2 :] << 8)
