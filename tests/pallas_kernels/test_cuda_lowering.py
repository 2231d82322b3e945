"""Every kernel lowers for CUDA without a GPU, and what comes out compiles for Hopper and Blackwell within its means."""

import importlib.util
import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from resin.pallas_kernels.dense_small import dense_small
from resin.pallas_kernels.draw import Draw
from resin.pallas_kernels.experts import expert_ffn
from resin.pallas_kernels.experts_packed import packed_expert_ffn
from resin.pallas_kernels.gates import SILU, Gate
from resin.pallas_kernels.gpu import Gpu
from resin.pallas_kernels.heads import NewTokens
from resin.pallas_kernels.mxfp4 import PackedMatrices, packed_shapes
from resin.pallas_kernels.paged_decode import paged_decode_attention
from resin.pallas_kernels.paged_prefill import paged_prefill_attention
from resin.pallas_kernels.project_heads import project_heads
from resin.pallas_kernels.rope_append import rope_append
from resin.pallas_kernels.route import RouteRule, route_tokens
from resin.pallas_kernels.sampling import sample_tokens
from resin.pallas_kernels.shift_state import shift_state
from tests.pallas_kernels.cuda_lowering import compile_for_gpu, lower_for_cuda

BF16, INT, FLOAT = jnp.bfloat16, jnp.int32, jnp.float32
TYPES = INT, INT, FLOAT  # of packed matrices
Array = jax.ShapeDtypeStruct

SHARED_BYTES = 232_448  # what one block may have on sm_90 and sm_100
B200 = Gpu(cores=148, shared_bytes=SHARED_BYTES, arch=100)
# Around the main loop of prefill some addresses go to memory (348 bytes at width 96); a spilled accumulator takes
# thousands.
SPILLED_BYTES = 512

# heads, kv_heads, width, page_entries, options
ATTENTION = {
    "8B": (32, 8, 128, 16, {}),
    "64": (9, 3, 64, 16, {}),
    "80": (8, 8, 80, 24, {"window": 20}),
    "softcap": (14, 2, 128, 16, {"window": 512, "softcap": 30.0}),
    "96": (16, 1, 96, 32, {}),
    "256": (8, 4, 256, 16, {"window": 512, "softcap": 50.0}),
    "wide": (32, 2, 256, 16, {}),
    "8B fp8": (32, 8, 128, 16, {"fp8_scale": 1.0}),
    "64 fp8": (9, 3, 64, 16, {"fp8_scale": 0.5}),
    "96 fp8": (16, 1, 96, 32, {"fp8_scale": 1.0}),
    "256 fp8": (8, 4, 256, 16, {"window": 512, "softcap": 50.0, "fp8_scale": 1.0}),
}


def attention_call(function, name: str, tokens: int | None, queries: int = 1):
    heads, kv_heads, width, entries, options = ATTENTION[name]
    sequences, stride = 4, kv_heads * entries
    call = partial(function, kv_heads=kv_heads, page_entries=entries, scale=0.1, **options)
    columns = [Array((sequences + 1,), INT), Array((512,), INT)]
    columns += [Array((sequences + 1,), INT)] if tokens else []
    columns += [Array((sequences,), INT), Array((sequences,), INT)]
    query = Array((tokens, heads, width) if tokens else (sequences, queries, heads, width), BF16)
    arena = Array((30_000, 32 * 2 * stride * width), jnp.uint16 if "fp8_scale" in options else BF16)
    return lambda *arguments: call(*arguments, 0, stride), (query, arena, *columns)


def append_call(fp8_scale: float | None, tokens: int = 64, with_keys: bool = False):
    call = partial(rope_append, kv_heads=8, page_entries=16, fp8_scale=fp8_scale, with_keys=with_keys)

    def function(x, cos, sin, arena, pages, offsets, norm):
        return call(x, cos, sin, arena, pages, offsets, 0, 128, q_norm=norm, k_norm=norm)

    turn, place = Array((tokens, 64), FLOAT), Array((tokens,), INT)
    arena = Array((30_000, 2**20), BF16 if fp8_scale is None else jnp.uint16)
    return function, (Array((tokens, 48, 128), BF16), turn, turn, arena, place, place, Array((128,), BF16))


def dense_call(rows: int, inner: int, columns: int, gate: Gate | None, with_bias: bool = False):
    def function(x, weight, norm, *bias):
        return dense_small(x, weight, norm=norm, gate=gate, bias=bias[0] if bias else None)[0]

    bias = [Array((columns,), BF16)] if with_bias else []
    return function, (Array((rows, inner), BF16), Array((inner, columns), BF16), Array((inner,), BF16), *bias)


def heads_call(
    rows: int,
    heads: int,
    kv_heads: int,
    width: int,
    norms: bool = False,
    fp8_scale: float | None = None,
    bias: bool = False,
):
    call = partial(project_heads, heads=heads, kv_heads=kv_heads, page_entries=16, fp8_scale=fp8_scale)

    def function(x, weight, norm, new, arena, *biases):
        return call(x, weight, new, arena, 0, 16 * kv_heads, norm=norm, bias=biases[0] if biases else None)

    turn, place = Array((rows, width // 2), FLOAT), Array((rows,), INT)
    new = NewTokens(turn, turn, place, place, *([Array((width,), BF16)] * 2 if norms else []))
    columns = (heads + 2 * kv_heads) * width
    arena = Array((30_000, 64 * kv_heads * 16 * width), BF16 if fp8_scale is None else jnp.uint16)
    arrays = Array((rows, 4096), BF16), Array((4096, columns), BF16), Array((4096,), BF16), new, arena
    return function, (*arrays, *([Array((columns,), BF16)] if bias else []))


def route_call(rows: int, inner: int, experts: int, rule: RouteRule):
    def function(x, gate, norm, bias, live):
        biases = {"selection_bias" if rule.share == "sigmoid" else "bias": bias}
        return route_tokens(x, gate, rule=rule, norm=norm, live=live, **biases)[:3]

    arrays = Array((rows, inner), BF16), Array((inner, experts), BF16), Array((inner,), BF16)
    return function, (*arrays, Array((experts,), FLOAT), Array((rows,), INT))


def experts_call(tokens: int, around: bool = False):
    if around:
        function, arrays = experts_call(tokens)
        call = lambda x, *rest: function(x, *rest[:-1], factor=rest[-1], residual=x)  # noqa: E731
        return call, (*arrays, Array((tokens,), FLOAT))
    ids, weights = Array((tokens, 8), INT), Array((tokens, 8), FLOAT)
    matrices = Array((128, 2048, 1536), BF16), Array((128, 768, 2048), BF16)
    return expert_ffn, (Array((tokens, 2048), BF16), ids, weights, *matrices)


def packed_call(tokens: int, experts: int = 32, hidden: int = 2880, width: int = 2880):
    """gpt-oss: biases, a clamped gate, a factor before and a residual after; the bodies that Triton compiles."""
    call = partial(packed_expert_ffn, gate=CLAMPED, gpu=B200)

    def function(x, ids, weights, gate_up, down, up_bias, down_bias, factor):
        return call(x, ids, weights, gate_up, down, biases=(up_bias, down_bias), factor=factor, residual=x)

    gate_up, down = (
        PackedMatrices(
            *(Array(shape, dtype) for shape, dtype in zip(packed_shapes(experts, *size), TYPES, strict=True))
        )
        for size in ((2 * width, hidden), (hidden, width))
    )
    ids, weights = Array((tokens, 4), INT), Array((tokens, 4), FLOAT)
    biases = Array((experts, 2 * width), BF16), Array((experts, hidden), BF16)
    return function, (Array((tokens, hidden), BF16), ids, weights, gate_up, down, *biases, Array((tokens,), FLOAT))


def sampling_call(rows: int, vocab: int):
    floats, ints = Array((rows,), FLOAT), Array((rows,), INT)
    return sample_tokens, (Array((rows, vocab), FLOAT), Draw(floats, ints, floats, floats, ints, ints, ints))


def state_call(sequences: int, tokens: int, width: int, taps: int, dtype=BF16, copies: int = 1):
    def function(x, arena, pages, indptr, is_fresh):
        outputs = jnp.repeat(pages, copies)
        return shift_state(x, arena, pages, outputs, indptr, is_fresh, 4, taps=taps, copies=copies)

    arrays = Array((tokens, width), BF16), Array((30_000, 6 * 2 * 8 * 16 * 64), dtype)
    columns = Array((2 * sequences,), INT), Array((sequences + 1,), INT), Array((sequences,), jnp.bool_)
    return function, (*arrays, *columns)


CLAMPED = Gate(alpha=1.702, limit=7.0, up_bias=1.0)
SOFTMAX = RouteRule(8, renormalise=True)
CALLS = {
    **{f"decode {name}": partial(attention_call, paged_decode_attention, name, None) for name in ATTENTION},
    **{f"prefill {name}": partial(attention_call, paged_prefill_attention, name, 2048) for name in ATTENTION},
    "decode 2 queries": partial(attention_call, paged_decode_attention, "8B", None, 2),
    "decode 5 queries": partial(attention_call, paged_decode_attention, "softcap", None, 5),
    "decode 8 queries": partial(attention_call, paged_decode_attention, "96", None, 8),
    "decode 8 wide queries": partial(attention_call, paged_decode_attention, "wide", None, 8),
    "decode 8 queries fp8": partial(attention_call, paged_decode_attention, "256 fp8", None, 8),
    "prefill of few tokens": partial(attention_call, paged_prefill_attention, "8B", 8),
    "append": partial(append_call, None),
    "append fp8": partial(append_call, 2.0),
    "append of a long prompt": partial(append_call, None, 8192, True),
    "dense 1 row": partial(dense_call, 1, 4096, 6144, None),
    "dense 1 row gated": partial(dense_call, 1, 4096, 28672, SILU),
    "dense 2 rows small": partial(dense_call, 2, 1024, 3072, None),
    "dense 1 row square": partial(dense_call, 1, 4096, 4096, None),
    "dense 8 rows small": partial(dense_call, 8, 3072, 1024, None),
    "dense 8 rows small gated": partial(dense_call, 8, 1024, 6144, SILU),
    "dense 16 rows": partial(dense_call, 16, 14336, 4096, Gate("gelu_tanh")),
    "dense 32 rows gated": partial(dense_call, 32, 4096, 28672, SILU),
    "dense 64 rows": partial(dense_call, 64, 14336, 4096, None),
    "dense 4 rows with bias": partial(dense_call, 4, 4096, 2880, None, True),
    "dense 2 rows gated with bias": partial(dense_call, 2, 2880, 5760, CLAMPED, True),
    "heads 1 row with bias": partial(heads_call, 1, 64, 8, 64, bias=True),
    "heads 32 rows with bias": partial(heads_call, 32, 28, 4, 128, bias=True),
    "heads 1 row": partial(heads_call, 1, 32, 8, 128),
    "heads 8 rows": partial(heads_call, 8, 14, 2, 64, norms=True),
    "heads 32 rows": partial(heads_call, 32, 32, 8, 128, norms=True),
    "heads 64 rows fp8": partial(heads_call, 64, 16, 1, 96, fp8_scale=1.0),
    "heads 16 rows wide": partial(heads_call, 16, 8, 4, 256, norms=True),
    "route 1 token": partial(route_call, 1, 2048, 128, SOFTMAX),
    "route 2 tokens": partial(route_call, 2, 2048, 128, SOFTMAX),
    "route 4 tokens": partial(route_call, 4, 2880, 32, RouteRule(4, renormalise=True)),
    "route 4 tokens of 8 experts": partial(route_call, 4, 4096, 8, RouteRule(2, renormalise=True)),
    "route 16 tokens": partial(route_call, 16, 2048, 60, RouteRule(4, "sigmoid", renormalise=True, scaling=2.5)),
    "route 32 tokens": partial(route_call, 32, 2048, 128, SOFTMAX),
    "route 64 tokens": partial(route_call, 64, 2048, 128, SOFTMAX),
    "route 128 tokens": partial(route_call, 128, 2880, 32, RouteRule(4, renormalise=True)),
    "route 2 tokens of 512 experts": partial(route_call, 2, 2048, 512, SOFTMAX),
    "route 9 tokens of 512 experts": partial(route_call, 9, 2048, 512, SOFTMAX),
    "route 32 tokens of 256 experts": partial(route_call, 32, 7168, 256, RouteRule(8, "sigmoid", renormalise=True)),
    "experts 1 token with factor": partial(experts_call, 1, around=True),
    "experts 64 tokens with factor": partial(experts_call, 64, around=True),
    "experts 1 token": partial(experts_call, 1),
    "experts 64 tokens": partial(experts_call, 64),
    "experts 4096 tokens": partial(experts_call, 4096),
    "packed experts 1 token": partial(packed_call, 1),
    "packed experts 5 tokens of 128 experts": partial(packed_call, 5, 128),
    "packed experts 32 tokens": partial(packed_call, 32),
    "packed experts 20 tokens of odd width": partial(packed_call, 20, 6, 96, 96),
    "packed experts 1024 tokens": partial(packed_call, 1024),
    "sampling": partial(sampling_call, 64, 200_000),
    "state 1 row": partial(state_call, 1, 1, 2048, 2),
    "state 256 rows": partial(state_call, 256, 256, 1024, 2, jnp.uint16),
    "state of 8 tokens": partial(state_call, 32, 256, 2048, 2, jnp.uint16, 8),
    "state of a prompt": partial(state_call, 16, 8192, 2048, 3, FLOAT),
}


@pytest.mark.parametrize("name", CALLS)
def test_lowers(name):
    function, arguments = CALLS[name]()
    modules = lower_for_cuda(function, *arguments)
    assert modules and all(module.ir.startswith(b"ML") for module in modules)


def test_layers_share_one_lowered_kernel():
    function, arguments = CALLS["decode 8B"]()

    def layers(query, *rest):
        for _ in range(6):
            query, *_ = function(query, *rest)
        return query

    assert len({module.ir for module in lower_for_cuda(layers, *arguments)}) == 1


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton 3.8")
@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("name", CALLS)
def test_compiles_within_its_means(name, arch):
    function, arguments = CALLS[name]()
    for module in lower_for_cuda(function, *arguments, arch=arch):
        compiled = compile_for_gpu(module, arch)
        assert compiled.shared_bytes <= SHARED_BYTES
        assert compiled.spilled_bytes <= (0 if name.startswith(("route", "experts")) else SPILLED_BYTES)
        for encoding in fragment_encodings(compiled.asm["ttgir"]):
            assert "sizePerThread = [4], threadsPerWarp = [32]" in encoding


def fragment_encodings(ttgir: str) -> list[str]:
    """Layouts of what inline assembly takes four elements of: they have to be what a lane of `mma.sync` holds."""
    used = re.findall(r"packed_element = 4.*-> tensor<\w+, (#\w+)>", ttgir)
    return [re.search(rf"^{layout} = (.*)$", ttgir, re.MULTILINE)[1] for layout in sorted(set(used))]
