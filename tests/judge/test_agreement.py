from __future__ import annotations

import pytest

from llmcomp.judge.agreement import agreement, first_divergent


def test_by_hand() -> None:
    reference = [(1, 2, 3, 4), (5, 6), (7, 8, 9)]
    found = agreement(reference, [(1, 2, 9, 4), (5, 6), (0, 8, 9)])
    # 2, 2 and 0 tokens, over answers of 3 tokens on average.
    assert found.first_divergent == pytest.approx(4 / 3) and found.first_divergent_share == pytest.approx(4 / 9)
    assert (found.identical, found.answers) == (1, 3)


def test_the_same_and_nothing_in_common() -> None:
    assert agreement([(1, 2), (3,)], [(1, 2), (3,)]).first_divergent_share == 1
    assert agreement([(1, 2)], [(2, 1)]).first_divergent_share == 0


def test_an_answer_that_stops_elsewhere() -> None:
    assert first_divergent([1, 2, 0], [1, 2, 3, 0]) == 2 and first_divergent([1, 2], [1, 2, 3]) == 2
    assert agreement([(1, 2)], [(1, 2, 3)]).identical == 0
