"""The comparison's own arithmetic: what counts as equal tokens, and the limits it reports."""

from __future__ import annotations

import pytest

from bench.cpu_compare import compare_tokens, summarise
from bench.cpu_limits import ModelSize, Workload, memory_bandwidth

DECODE = Workload("decode", prompts=2, prompt_tokens=10, new_tokens=20, target=1.0)
PREFILL = Workload("prefill", prompts=1, prompt_tokens=100, new_tokens=1, target=1.0)
SIZE = ModelSize(layer_params=1000, head_params=200, kv_values_per_token=8, attention_width=16)


def test_equal_rows_count_every_token() -> None:
    reference = {"token_ids": [[1, 2], [3, 4]], "gaps": [[1.0, 1.0], [1.0, 1.0]]}
    assert compare_tokens([[1, 2], [3, 4]], reference) == (4, 0)


def test_a_row_may_part_at_a_tie_and_is_not_compared_after_it() -> None:
    reference = {"token_ids": [[1, 2, 3], [4, 5, 6]], "gaps": [[1.0, 1e-5, 1.0], [1.0, 1.0, 1.0]]}
    assert compare_tokens([[1, 9, 8], [4, 5, 6]], reference) == (4, 1)


def test_a_clear_difference_is_an_error_that_names_the_place() -> None:
    reference = {"token_ids": [[1, 2, 3]], "gaps": [[1.0, 0.5, 1.0]]}
    with pytest.raises(RuntimeError, match=r"prompt 0, place 1: Resin chose token 9, transformers 2.*0\.5"):
        compare_tokens([[1, 9, 3]], reference)


def test_rows_of_other_lengths_are_an_error() -> None:
    with pytest.raises(ValueError, match="zip"):
        compare_tokens([[1]], {"token_ids": [[1, 2]], "gaps": [[1.0, 1.0]]})


def test_tokens_per_s_of_decode_leaves_out_the_first_tokens() -> None:
    assert DECODE.tokens_per_s({"first_s": 9.0, "decode_s": 2.0, "decode_tokens": 38}) == 19.0
    assert PREFILL.tokens_per_s({"first_s": 0.5, "decode_s": 0.0, "decode_tokens": 0}) == 200.0


def test_decode_limit_reads_weights_once_a_step_and_the_cache_of_every_sequence() -> None:
    # (1000 + 200 + 2 * (10 + 20 / 2) * 8) values of 4 bytes give two tokens.
    assert SIZE.limit_tokens_per_s(DECODE, bytes_per_s=4 * 1520, flops=0.0) == pytest.approx(2.0)


def test_prefill_limit_counts_the_head_once_and_half_of_the_attention() -> None:
    # 2 * 1000 * 100 + 2 * 200 + 4 * 16 * 100**2 / 2 FLOP for 100 tokens.
    assert SIZE.limit_tokens_per_s(PREFILL, bytes_per_s=0.0, flops=520_400.0) == pytest.approx(100.0)


def test_the_ratio_is_the_median_of_pairs() -> None:
    row = summarise(DECODE, {"resin": [10.0, 30.0, 8.0], "transformers": [10.0, 10.0, 10.0]}, limit=40.0)
    assert row["ratio"] == 1.0
    assert row["ratio_range"] == [0.8, 3.0]
    assert row["tokens_per_s"] == {"resin": 10.0, "transformers": 10.0}
    assert row["fraction_of_limit"] == {"resin": 0.25, "transformers": 0.25}


def test_bandwidth_is_that_of_a_memory() -> None:
    assert 1e8 < memory_bandwidth(threads=1) < 1e13
