"""Page rows of one cache group in a decode plan's buffer: one after the other, ends in front of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from resin.sched.lease import PagedGroup

FEW_ROWS = 6  # whose ends are moved one by one


@dataclass(frozen=True, slots=True)
class PagedColumns:
    """Offsets of a History or Window group's columns, in int32.

    Attributes:
        group: whose pages they are.
        width: places.
        indptr: [width + 1], where each place's row begins among the ids, and where the last one ends.
        first_position: [width], of the first page of each row of a Window group.
        ids, ids_stop: page ids of all rows, and zeros behind them.
    """

    group: PagedGroup
    width: int
    indptr: int
    first_position: int
    ids: int
    ids_stop: int

    def append(
        self, buffer: np.ndarray, latest: np.ndarray, total: int, places: Sequence[int], pages: Sequence[int]
    ) -> int:
        """The latest buffer's rows with one more page at the end of those of some places.

        Args:
            buffer: int32, to be written; what comes before the ids is that of `latest`.
            latest: int32, the buffer before.
            total: ids of all its rows.
            places: rising.
            pages: one for each of them.

        Returns:
            Ids of all rows.
        """
        ends, stop = self.indptr + 1, self.indptr + 1 + self.width
        if len(places) <= FEW_ROWS:
            for place in places:
                buffer[ends + place : stop] += 1
            held = [int(latest[ends + place]) for place in places]
        else:
            grown = np.zeros(self.width, np.int32)
            grown[places] = 1
            buffer[ends:stop] += np.add.accumulate(grown, out=grown)
            held = latest[ends:stop][places].tolist()
        read = write = self.ids
        for end, page in zip(held, pages, strict=True):
            stop = self.ids + end
            buffer[write : write + stop - read] = latest[read:stop]
            write += stop - read
            buffer[write] = page
            read, write = stop, write + 1
        return self._finish(buffer, latest, read, write, total)

    def replace(
        self,
        buffer: np.ndarray,
        latest: np.ndarray,
        total: int,
        places: Sequence[int],
        firsts: Sequence[int],
        rows: Sequence[np.ndarray],
    ) -> int:
        """The latest buffer's rows with those of some places replaced.

        Args:
            buffer: int32, to be written; what comes before the ids is that of `latest`.
            latest: int32, the buffer before.
            total: ids of all its rows.
            places: rising.
            firsts: logical index of each one's first page.
            rows: int32 page ids of each.

        Returns:
            Ids of all rows.
        """
        starts, stop = self.indptr, self.indptr + 1 + self.width
        read = write = self.ids
        shift = 0  # of the row ends behind the rows done so far
        for place, first, pages in zip(places, firsts, rows, strict=True):
            row_start, row_stop = self.ids + int(latest[starts + place]), self.ids + int(latest[starts + place + 1])
            if row_start > read:
                buffer[write : write + row_start - read] = latest[read:row_start]
                write += row_start - read
            buffer[write : write + len(pages)] = pages
            write += len(pages)
            read = row_stop
            if write - read != shift:
                buffer[starts + place + 1 : stop] += write - read - shift
                shift = write - read
            if self.group.window_tokens:
                buffer[self.first_position + place] = first * self.group.span_tokens
        return self._finish(buffer, latest, read, write, total)

    def _finish(self, buffer: np.ndarray, latest: np.ndarray, read: int, write: int, total: int) -> int:
        """Copies the rows that are left, and zeros."""
        stop = self.ids + total
        buffer[write : write + stop - read] = latest[read:stop]
        write += stop - read
        buffer[write : self.ids_stop] = 0
        return write - self.ids
