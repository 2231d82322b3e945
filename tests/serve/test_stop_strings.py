"""Stop strings in text that arrives in pieces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serve.stop_strings import StopMatcher

LETTERS = st.sampled_from("ab\U0001f600")
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=4)


def cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The rule, character by character: the first stop string that is complete, the longest of those."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(pieces=st.lists(st.text(LETTERS, max_size=6), max_size=12), stops=STOPS)
def test_pieces_give_what_the_whole_text_gives(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for piece in pieces:
        shown += matcher.push(piece)
        # Never more than what is shown in the end: nothing has to be taken back.
        assert cut("".join(pieces), stops)[0].startswith(shown)
    if matcher.matched is None:
        shown += matcher.flush()
    assert (shown, matcher.matched) == cut("".join(pieces), stops)


def test_text_that_cannot_become_a_stop_is_shown_at_once() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("the E") == "the "
    assert matcher.push("N") == ""
    assert matcher.push("T") == "ENT"
    assert matcher.push("EN") == ""
    assert matcher.flush() == "EN"
