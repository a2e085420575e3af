import pytest
from rows import row

from megatron_brorl.rewards.verifiers.short_answer import check_row, find, verify


@pytest.mark.parametrize(
    ("right", "response", "reference", "metadata"),
    [
        (1, "The answer is the mitochondria.", "Mitochondria", {}),
        (1, r"\boxed{\text{Newton's second law}}", "newton\u2019s second law", {}),
        (1, "Schrödinger", "Schrodinger", {}),
        (1, r"\alpha decay", "alpha decay", {}),
        (1, "water", "H2O", {"answers": ["water", "dihydrogen monoxide"]}),
        (0, "Na", "NaCl", {}),
        (0, "Paris or London", "Paris", {}),
        (0, "x+1", "x-1", {}),
        (1, "0.5", "1/2", {}),
        (1, r"\boxed{3.0\times10^8\ \text{m/s}}", "3e8 m/s", {}),
        (1, r"5.0 \mathrm{m\,s^{-1}}", "5 m/s", {}),
        (1, "5 m/s", "5", {}),
        (0, "5", "5 m/s", {}),
        (0, "5 km/s", "5 m/s", {}),
        (0, "9.8 m/s^2", "9.81 m/s^2", {}),
        (1, "9.8 m/s^2", "9.81 m/s^2", {"tolerance": 0.01}),
        (0, "9.7 m/s^2", "9.81 m/s^2", {"tolerance": 0.01}),
        (0, "9.8 m/s", "9.81 m/s^2", {"tolerance": 0.01}),
        (1, "9.9%", "0.1", {"tolerance": 0.01}),
        (0, r"\boxed{iron} or \boxed{gold}", "gold", {}),
        (0, "one\ntwo", "one two", {}),
    ],
)
def test_short_answers(right, response, reference, metadata):
    task = row(reference, **metadata)
    check_row(task, "a:1")
    answer = find(response)
    assert (0.0 if answer is None else verify(answer, task).reward) == right


@pytest.mark.parametrize(
    ("reference", "equal", "different"),
    [
        ("H2O", r"\text{H}_2\text{O}", "HO_2"),
        ("Fe2(SO4)3", r"\mathrm{Fe_2(SO_4)_3}", "Fe2SO4"),
        ("CuSO4·5H2O", r"CuSO_4 \cdot 5H_2O", r"CuSO_4 \cdot H_2O"),
        (r"\text{CO}_2", "CO₂", "CO"),
        ("Na^+", "Na+", "Na"),
        ("Ca^{2+}", "Ca²⁺", "Ca^{3+}"),
        ("SO4^2-", r"\text{SO}_4^{2-}", "SO_4^2"),
        ("NH_4^+", r"\ce{NH4+}", "NH_4^-"),
        ("v0 t", "v_{0} t", "v^0 t"),
        ("x^2", "$x^2$", "x2"),
        ("m^-1", "m⁻¹", "m-1"),
        ("x^2", "x^{2}", "x^{2y}"),
        ("x^2y", "x²y", "x^{2y}"),
        ("e^-x", "$e^{-x}$", "e^{x}"),
        ("2^{n} - 1", "2^n - 1", "2^{n-1}"),
        ("x^12", "x¹²", "x^{1}2"),
        ("5 μm", r"5\,\mu\text{m}", "5 mm"),
        ("2.5 microseconds", r"$2.50\ \mu\mathrm{s}$", r"2.5\,\mu\text{g}"),
        (r"3\,\mu\text{L}", "3 \u00b5L", "3 L"),
        ("mu and sigma", r"\mu and sigma", "micro and sigma"),
    ],
)
def test_indices_charges_exponents_and_micro(reference, equal, different):
    assert (verify(equal, row(reference)).reward, verify(different, row(reference)).reward) == (1, 0)


def test_reason_names_the_difference():
    assert verify("5", row("5 m/s")).reason == "5 does not have the unit of 5 m/s"
    assert verify("ice", row("water", answers=["H2O"])).reason == "ice is not water"
