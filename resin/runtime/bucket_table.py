"""The bucket table: which shapes get an executable."""

from __future__ import annotations

from collections.abc import Sequence

from resin.plan import Bucket, CacheGeometry, CacheGroup, GroupGeometry, Phase, StateGroup, WindowGroup
from resin.plan.cache import REFERENCE_CONTEXT_TOKENS, pages_of_sequence
from resin.plan.config import MAX_OVERLAP

# Page ids that a plan carries at most beyond one full sequence: 256 KiB of the packed buffer for decode. Prefill packs
# what is mostly new, and whose chunks fill the buffer already: 32 KiB, with 16-token pages contexts of 131072 tokens.
MAX_ROW_PAGES = {Phase.DECODE: 1 << 16, Phase.PREFILL: 1 << 13}

# Tokens of a step that checks drafts at most: beyond, a step costs what its tokens cost, and drafts gain nothing.
MAX_VERIFY_TOKENS = 256

MAX_GPU_SEQUENCES = 256
CPU_SEQUENCES = 16
GPU_DECODE = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


def decode_sizes(platform: str, max_sequences: int) -> tuple[int, ...]:
    """Padded sequence counts up to max_sequences.

    On CPU a padded row costs little beside the weights that every step reads, so quadrupling is enough.
    """
    sizes = GPU_DECODE if platform == "gpu" else tuple(4**power for power in range(6))
    return (*(size for size in sizes if size < max_sequences), max_sequences)


def sequences_that_fit(groups: Sequence[CacheGroup], geometry: CacheGeometry, context_tokens: int, room: int) -> int:
    """Sequences that a GPU runs at once where nothing is said: what fits its memory at a usual length, 256 at most.

    Args:
        groups, geometry: the model's cache groups.
        context_tokens: longest sequence; a usual one has no more than 4096 tokens.
        room: bytes of the arena.
    """
    tokens = min(context_tokens, REFERENCE_CONTEXT_TOKENS)
    pages = sum(pages_of_sequence(group, fill, tokens) for group, fill in zip(groups, geometry.groups, strict=True))
    most = room // max(pages * geometry.page_bytes, 1)
    return max((size for size in GPU_DECODE if size <= min(most, MAX_GPU_SEQUENCES)), default=1)


def prefill_sizes(platform: str, max_plan_tokens: int) -> tuple[int, ...]:
    """Padded token counts up to max_plan_tokens: doubling on GPU, quadrupling on CPU."""
    factor = 2 if platform == "gpu" else 4
    sizes = [16]
    while sizes[-1] * factor < max_plan_tokens:
        sizes.append(sizes[-1] * factor)
    return (*(size for size in sizes if size < max_plan_tokens), max_plan_tokens)


def build_buckets(
    groups: Sequence[CacheGroup],
    geometry: CacheGeometry,
    *,
    decode_sequences: Sequence[int],
    prefill_tokens: Sequence[int],
    prefill_sequences: int,
    max_context_tokens: int,
    draft_tokens: int = 0,
) -> tuple[Bucket, ...]:
    """Every bucket, smallest first within its phase. Attention loops as far as a plan's rows go, so one page-row
    capacity a bucket is enough.

    Args:
        groups, geometry: the model's cache groups.
        decode_sequences: padded B of decode buckets.
        prefill_tokens: padded T of prefill buckets.
        prefill_sequences: most sequences in a prefill bucket; a bucket of T tokens takes at most T.
        max_context_tokens: longest sequence.
        draft_tokens: drafts that a decode step checks of a sequence: a second decode bucket where there is room.
    """
    # Rows hold pages for drafts that did not hold as well, of every plan in flight.
    ahead = (MAX_OVERLAP + 1) * draft_tokens

    def bucket(phase: Phase, sequences: int, tokens: int) -> Bucket:
        pages = tuple(
            _row_pages(group, fill, sequences, tokens, ahead, max_context_tokens, MAX_ROW_PAGES[phase])
            for group, fill in zip(groups, geometry.groups, strict=True)
        )
        return Bucket(phase, sequences, tokens, pages)

    prefill = [bucket(Phase.PREFILL, min(prefill_sequences, tokens), tokens) for tokens in prefill_tokens]
    decode = [bucket(Phase.DECODE, sequences, sequences) for sequences in decode_sequences]
    if draft_tokens:
        width = 1 + draft_tokens
        wide = [sequences for sequences in decode_sequences if sequences * width <= MAX_VERIFY_TOKENS]
        decode += [bucket(Phase.DECODE, sequences, sequences * width) for sequences in wide]
    return (*prefill, *decode)


def _row_pages(
    group: CacheGroup, fill: GroupGeometry, sequences: int, tokens: int, ahead: int, max_context_tokens: int, most: int
) -> int:
    whole = pages_of_sequence(group, fill, max_context_tokens)
    if isinstance(group, StateGroup):
        return sequences * whole
    if isinstance(group, WindowGroup):
        # New tokens that are shared among the sequences may cut one page more of each.
        within = min(whole + 1 + -(-ahead // fill.span_tokens), -(-max_context_tokens // fill.span_tokens))
        return sequences * within + -(-tokens // fill.span_tokens)
    return max(whole, min(sequences * whole, most))
