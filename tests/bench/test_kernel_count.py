"""Kernels are counted from program text: calls are followed, loops multiply, conditionals count their least."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from bench.kernel_count import count_kernels

PROGRAM = """HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[4]{0})->f32[4]{0}}

%fused (param_0: f32[4]) -> f32[4] {
  %param_0 = f32[4]{0} parameter(0)
  ROOT %add = f32[4]{0} add(%param_0, %param_0)
}

%command_buffer (p: f32[4]) -> (f32[4], f32[4]) {
  %p = f32[4]{0} parameter(0)
  %a = f32[4]{0} fusion(%p), kind=kLoop, calls=%fused
  %gemm = (f32[4]{0}, /*index=1*/s8[64]{0}) custom-call(%a), custom_call_target="__cublas$gemm"
  %g = f32[4]{0} get-tuple-element(%gemm), index=0
  ROOT %t = (f32[4]{0}, f32[4]{0}) tuple(%g, %a)
}

%body (state: (s32[], f32[4])) -> (s32[], f32[4]) {
  %state = (s32[], f32[4]{0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %v = f32[4]{0} get-tuple-element(%state), index=1
  %w = f32[4]{0} fusion(%v), kind=kLoop, calls=%fused
  ROOT %s = (s32[], f32[4]{0}) tuple(%i, %w)
}

%condition (state.1: (s32[], f32[4])) -> pred[] {
  %state.1 = (s32[], f32[4]{0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  %five = s32[] constant(5)
  ROOT %lt = pred[] compare(%i.1, %five), direction=LT
}

%cheap (c: f32[4]) -> f32[4] {
  ROOT %c = f32[4]{0} parameter(0)
}

%dear (d: f32[4]) -> f32[4] {
  %d = f32[4]{0} parameter(0)
  ROOT %e = f32[4]{0} fusion(%d), kind=kLoop, calls=%fused
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %buffers = (f32[4]{0}, f32[4]{0}) call(%x), to_apply=%command_buffer
  %y = f32[4]{0} get-tuple-element(%buffers), index=0
  %zero = s32[] constant(0)
  %init = (s32[], f32[4]{0}) tuple(%zero, %y)
  %loop = (s32[], f32[4]{0}) while(%init), condition=%condition, body=%body, TRIPS
  %l = f32[4]{0} get-tuple-element(%loop), index=1
  %start = ((f32[4]{0}), f32[4]{0}) all-reduce-start(%l), to_apply=%fused
  %done = f32[4]{0} all-reduce-done(%start)
  %flag = pred[] constant(true)
  ROOT %out = f32[4]{0} conditional(%flag, %done, %done), true_computation=%dear, false_computation=%cheap
}
""".replace("TRIPS", 'backend_config={"known_trip_count":{"n":"5"}}')


def test_a_program_by_hand() -> None:
    # 2 in the command buffer, 5 turns of body and condition, 1 all-reduce, nothing in the cheap branch.
    assert count_kernels(PROGRAM) == 2 + 5 * 2 + 1 + 0


def test_unknown_trip_counts_and_listed_branches() -> None:
    unknown = PROGRAM.replace(', backend_config={"known_trip_count":{"n":"5"}}', "")
    assert count_kernels(unknown) == 2 + 2 + 1
    branches = "true_computation=%dear, false_computation=%cheap"
    listed = PROGRAM.replace(branches, "branch_computations={%dear, %dear}")
    assert count_kernels(listed) == 2 + 5 * 2 + 1 + 1


def test_a_program_of_this_compiler_grows_with_its_work() -> None:
    def text(products: int) -> str:
        def chain(x: jax.Array) -> jax.Array:
            for _ in range(products):
                x = jnp.sort(x @ x, axis=0)
            return x

        return jax.jit(chain).lower(jax.ShapeDtypeStruct((8, 8), jnp.float32)).compile().as_text() or ""

    one, three = count_kernels(text(1)), count_kernels(text(3))
    assert one >= 2
    assert three - one >= 2 * (one - 1) > 0


def test_text_without_an_entry_is_refused() -> None:
    with pytest.raises(ValueError, match="ENTRY"):
        count_kernels("HloModule nothing")
