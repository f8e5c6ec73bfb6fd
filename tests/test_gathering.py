"""Threads that come at the same time: one acts at a time, for all that wait."""
from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from app import gathering
from app.gathering import Gathering
from tests.servers import wait_until


def test_one_acts_at_a_time() -> None:
    """Whoever comes while one acts waits, the first that comes as well as those behind whom it was handed over."""
    acts, go_on = list[list[str]](), [threading.Event() for _ in range(3)]

    def act() -> None:
        places = together.take()
        acts.append([place.item for place in places])
        assert go_on[len(acts) - 1].wait(30)
        together.hand_over()
        gathering.settle(places)

    together: Gathering[str] = Gathering(act)
    with ThreadPoolExecutor(4) as pool:
        for number, names in enumerate((["a"], ["b"], ["c", "d"])):
            for name in names:
                pool.submit(together.join, name)
            wait_until(lambda: len(together._waiting) == (len(names) if number else 0), what="they wait")
            if number:
                go_on[number - 1].set()
            wait_until(lambda: len(acts) == number + 1, what="the next acts")
        go_on[2].set()
    assert [sorted(names) for names in acts] == [["a"], ["b"], ["c", "d"]]


def test_as_many_as_came_together_are_waited_for() -> None:
    taken, first = list[list[str]](), threading.Event()

    def act() -> None:
        together.gather()
        if not taken:
            assert first.wait(30)
        places = together.take()
        taken.append(sorted(place.item for place in places))
        together.hand_over()
        gathering.settle(places)

    together: Gathering[str] = Gathering(act, patience=60)
    with ThreadPoolExecutor(3) as pool:
        for names in (["a", "b", "c"], ["d", "e", "f"]):
            joined = [pool.submit(together.join, name) for name in names[:-1]]
            wait_until(lambda: len(together._waiting) == 2, what="two wait")
            joined.append(pool.submit(together.join, names[-1]))
            if not taken:
                wait_until(lambda: len(together._waiting) == 3, what="all wait")
                first.set()
            for each in joined:
                each.result(30)
    assert taken == [["a", "b", "c"], ["d", "e", "f"]]
    together._patience = 0
    together.join("g")
    together._patience = 60  # who came alone, though others were expected, is followed by one alone
    together.join("h")
    assert taken[2:] == [["g"], ["h"]]
