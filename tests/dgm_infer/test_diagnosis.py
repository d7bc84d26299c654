"""Findings come worst first, print one per line, and are falsy if there are none."""

import pandas
import torch

from dgm_infer.diagnosis import diagnosis, finding

ONE = torch.ones((), dtype=torch.bool)
SLOW = finding("imprecise", "few draws", "draw more", torch.tensor([[False, True], [True, False]]))
STUCK = finding("useless", "chains never moved", "start elsewhere", ONE)
APART = finding("misleading", "chains disagree", "warm up longer", ONE)


def test_findings_come_worst_first_and_print_one_per_line():
    found = diagnosis([SLOW, STUCK, APART], "R-hat at most 1.2")
    assert list(found) == [STUCK, APART, SLOW]
    assert bool(found)
    assert len(found) == 3
    assert str(found) == repr(found)
    assert str(found).splitlines() == [
        "useless     chains never moved: start elsewhere",
        "misleading  chains disagree: warm up longer",
        "imprecise   few draws: draw more",
    ]


def test_nothing_wrong_is_falsy_and_says_by_which_numbers():
    found = diagnosis([], "R-hat at most 1.002")
    assert not found
    assert str(found) == "nothing is wrong: R-hat at most 1.002"


def test_problems_are_named_by_their_flat_indices():
    assert SLOW.problems == (1, 2)
    assert STUCK.problems == (0,)


def test_findings_make_a_table():
    table = pandas.DataFrame(diagnosis([SLOW, STUCK], ""))
    assert list(table.columns) == ["severity", "what", "remedy", "problems", "code"]
    assert list(table.severity) == ["useless", "imprecise"]
