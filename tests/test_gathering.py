"""What several threads write at one moment is one write; what one of them cannot write keeps nobody else."""
from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from tasks.gathering import Gathering
from tests.servers import wait_until


class Book:
    """Keeps what was written together. The first write waits until it may go on; nothing below zero is written."""

    def __init__(self) -> None:
        self.written: list[list[int]] = []
        self.tried: list[list[int]] = []
        self.goes_on = threading.Event()
        self.gathering: Gathering[int, int] = Gathering(self.write)
        self.came: dict[int, int | str] = {}

    def write(self, numbers: Sequence[int]) -> list[int]:
        self.tried.append(list(numbers))
        if len(self.tried) == 1:
            assert self.goes_on.wait(20)
        if min(numbers) < 0:
            raise ValueError(numbers)
        self.written.append(list(numbers))
        return [number * 10 for number in numbers]

    def put(self, number: int) -> None:
        try:
            self.came[number] = self.gathering.put("key", number)
        except ValueError:
            self.came[number] = "refused"

    def put_all(self, first: int, *others: int) -> None:
        """The others come, in this order, while the first is being written."""
        threads = [threading.Thread(target=self.put, args=(number,)) for number in (first, *others)]
        for number, thread in enumerate(threads):
            thread.start()
            wait_until(lambda: self.tried and len(self.gathering._waiting["key"]) == number, 20)
        self.goes_on.set()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        assert self.gathering._waiting == {}


def test_what_comes_during_a_write_is_written_together_next() -> None:
    book = Book()
    book.put_all(1, 2, 3, 4)
    assert book.written == [[1], [2, 3, 4]] and book.came == {1: 10, 2: 20, 3: 30, 4: 40}


@pytest.mark.parametrize("bad", [2, 3, 4])
def test_what_one_cannot_write_keeps_nobody_else(bad: int) -> None:
    book = Book()
    book.put_all(1, *(-number if number == bad else number for number in (2, 3, 4)))
    good = {2, 3, 4} - {bad}
    assert book.came == {1: 10, -bad: "refused", **{number: number * 10 for number in good}}
    assert sorted(map(tuple, book.written)) == [(1,), *((number,) for number in sorted(good))]


def test_a_write_that_fails_alone_fails_once_and_the_next_goes_on() -> None:
    book = Book()
    book.put_all(-1, 2)
    assert book.came == {-1: "refused", 2: 20} and book.tried == [[-1], [2]]
