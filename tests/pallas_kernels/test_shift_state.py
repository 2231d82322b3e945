"""The inputs before each chunk, read and moved on in the arena: kernel and reference against joined NumPy arrays."""

import numpy as np
import pytest

from tests.pallas_kernels.state_cases import check_shift_state


@pytest.mark.parametrize("is_kernel", [False, True], ids=["reference", "kernel"])
@pytest.mark.parametrize(
    ("dtypes", "taps", "lengths"),
    [
        (("bfloat16", "bfloat16"), 2, (1,) * 5),
        (("bfloat16", "uint16"), 3, (2, 1, 4)),
        (("float32", "float32"), 6, (3, 1, 0, 7)),
        (("float32", "float32"), 2, (2, 0, 5, 0)),
        (("float32", "bfloat16"), 1, (3, 1, 7)),
    ],
    ids=str,
)
def test_equals_joining_state_and_chunk(dtypes, taps, lengths, is_kernel):
    check_shift_state(*dtypes, taps, lengths, interpret=True if is_kernel else None)


@pytest.mark.parametrize("is_kernel", [False, True], ids=["reference", "kernel"])
def test_a_state_may_span_pages_and_stop_within_one(is_kernel):
    check_shift_state(
        "float32", "float32", 2, (1, 4, 1), width=300, rows_per_page=3, first_row=2, interpret=is_kernel or None
    )


def test_a_state_that_stays_in_place_is_read_before_it_is_written():
    check_shift_state("float32", "float32", 2, (1, 1, 1, 3), in_place=np.ones(4, bool), interpret=True)


@pytest.mark.parametrize("is_kernel", [False, True], ids=["reference", "kernel"])
@pytest.mark.parametrize(("taps", "copies"), [(2, 4), (3, 2), (1, 8)])
def test_every_count_of_tokens_leaves_a_copy(taps, copies, is_kernel):
    lengths = (copies,) * 4
    check_shift_state(
        "bfloat16", "uint16", taps, lengths, pages=120, copies=copies, interpret=True if is_kernel else None
    )
