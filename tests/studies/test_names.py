from typing import get_args

from flexact.config import PAPER_CANDIDATES, Correction
from flexact.studies.synthetic.options import TITLES, alpha_of, canonical, title


def test_every_correction_and_every_truth_of_the_paper_has_a_title() -> None:
    assert TITLES.keys() == {*get_args(Correction), *PAPER_CANDIDATES}
    assert title("grad_norm_kl") == "KL from gradient norms"
    assert title("gelu") == "gelu"


def test_zeros_that_say_nothing_are_left_out_of_a_name_and_no_other_digit() -> None:
    names = {"0": "0", "0.0": "0", "00.30": "0.3", "1.0": "1", "10": "10", "0.1234567890": "0.123456789"}
    assert {given: canonical(f"flexact-a{given}") for given in names} == {
        given: f"flexact-a{name}" for given, name in names.items()
    }
    for given in names:
        assert alpha_of(f"flexact-a{given}") == float(given)
    for other in ("flexact-default", "relu", "flexact-a", "flexact-a.3", "flexact-a-1", "flexact-a1e3"):
        assert canonical(other) == other
        assert alpha_of(other) is None
