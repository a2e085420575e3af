from __future__ import annotations

import pytest

from megatron_brorl.errors import UserError
from megatron_brorl.rewards.verifiers.short_answer import check_row, find, verify


def row(reference, **metadata):
    return {"id": "0", "prompt": "", "answer": reference, "metadata": metadata}


@pytest.mark.parametrize(
    ("right", "response", "reference", "metadata"),
    [
        (1, "The answer is the mitochondria.", "Mitochondria", {}),
        (1, r"\boxed{\text{Newton's second law}}", "newton\u2019s second law", {}),
        (1, "Schrödinger", "Schrodinger", {}),
        (1, r"\alpha decay", "alpha decay", {}),
        (1, "left-handed", "left handed", {}),
        (1, "water", "H2O", {"answers": ["water", "dihydrogen monoxide"]}),
        (0, "ice", "H2O", {"answers": ["water"]}),
        (0, "Na", "NaCl", {}),
        (0, "Vitamin A", "Vitamin B", {}),
        (0, "Paris or London", "Paris", {}),
        (0, "x+1", "x-1", {}),
        (1, "0.5", "1/2", {}),
        (1, r"\boxed{3.0\times10^8\ \text{m/s}}", "3e8 m/s", {}),
        (1, r"5.0 \mathrm{m\,s^{-1}}", "5 m/s", {}),
        (1, "5 m/s", "5", {}),
        (0, "5", "5 m/s", {}),
        (0, "5 km/s", "5 m/s", {}),
        (0, "-5", "5", {}),
        (0, "9.8 m/s^2", "9.81 m/s^2", {}),
        (1, "9.8 m/s^2", "9.81 m/s^2", {"tolerance": 0.01}),
        (0, "9.7 m/s^2", "9.81 m/s^2", {"tolerance": 0.01}),
        (0, "9.8 m/s", "9.81 m/s^2", {"tolerance": 0.01}),
        (1, "9.9%", "0.1", {"tolerance": 0.01}),
        (0, "8.9%", "0.1", {"tolerance": 0.01}),
        (0, r"\boxed{iron} or \boxed{gold}", "gold", {}),
        (0, "one\ntwo", "one two", {}),
        # Indices and charges
        (1, r"\text{H}_2\text{O}", "H2O", {}),
        (1, "C_6H_{12}O_6", "C6H12O6", {}),
        (1, r"\mathrm{Fe_2(SO_4)_3}", "Fe2(SO4)3", {}),
        (1, r"CuSO_4 \cdot 5H_2O", "CuSO4·5H2O", {}),
        (1, "CO₂", r"\text{CO}_2", {}),
        (1, "Na^+", "Na+", {}),
        (1, "Cl^{-}", "Cl^-", {}),
        (1, "Ca²⁺", "Ca^{2+}", {}),
        (1, r"\text{SO}_4^{2-}", "SO4^2-", {}),
        (1, r"\ce{NH4+}", "NH_4^+", {}),
        (1, "v_{0} t", "v0 t", {}),
        (0, "HO_2", "H2O", {}),
        (0, "Na^-", "Na+", {}),
        (0, "Na", "Na^+", {}),
        (0, "Ca^{3+}", "Ca^{2+}", {}),
        (0, "x_2", "x^2", {}),
        (0, "x2", "x^2", {}),
        (0, "m-1", "m^{-1}", {}),
        # The prefix micro
        (1, r"5\,\mu\text{m}", "5 μm", {}),
        (1, r"$2.50\ \mu\mathrm{s}$", "2.5 microseconds", {}),
        (1, "3 \u00b5L", r"3\,\mu\text{L}", {}),
        (1, r"4\,\mu\text{Sv}", "4 μSv", {}),
        (1, r"\mu and sigma", "mu and sigma", {}),
        (0, "5 mm", "5 μm", {}),
        (0, r"5\,\mu\text{g}", "5 μm", {}),
    ],
)
def test_short_answers(right, response, reference, metadata):
    to = row(reference, **metadata)
    check_row(to, "a:1")
    answer = find(response)
    assert (0.0 if answer is None else verify(answer, to).reward) == right


def test_reason_names_the_difference():
    assert verify("5", row("5 m/s")).reason == "5 does not have the unit of 5 m/s"
    assert verify("ice", row("water", answers=["H2O"])).reason == "ice is not water"


@pytest.mark.parametrize(
    ("reference", "metadata", "what"),
    [
        (None, {}, "needs answer"),
        ("?!", {}, "neither letters nor digits"),
        ("x", {"answers": "y"}, "must be a list"),
        ("x", {"answers": [""]}, "must be a list"),
        ("1", {"tolerance": 1}, "relative error"),
        ("1", {"tolerance": "1%"}, "relative error"),
        ("1", {"tolerance": True}, "relative error"),
    ],
)
def test_invalid_rows_are_refused(reference, metadata, what):
    with pytest.raises(UserError, match=f"a:1: .*{what}"):
        check_row(row(reference, **metadata), "a:1")
