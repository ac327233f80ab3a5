"""The checklist of a posterior: which lines there are, and what is refused."""

import pytest
import torch
from model_cases import Linear, linear_data, prior_posterior

from pbnn.errors import DataError, PbnnWarning
from pbnn.evaluate.acceptance import check_posterior
from pbnn.evaluate.costs import Costs


@pytest.fixture(scope="module")
def rows():
    model = Linear(2)
    x, y = linear_data(60, 2)
    return model, prior_posterior(model, x, y, draws=30), (x[:30], y[:30]), (x[30:], y[30:])


def test_each_set_has_two_lines_then_mass_then_the_gate(rows):
    model, posterior, validation, test = rows
    x = test[0]
    found = check_posterior(
        model,
        posterior,
        validation,
        test,
        x_train=x,
        ood={"far": 5 * x, "same": x},
        costs=Costs(error=10.0, review=1.0),
        tolerance=1.0,
        shifts={"wider": {0: x, 1: 2 * x}},
    )
    starts = [line.text.partition(",")[0] for line in found.checklist]
    assert starts[:5] == ["A", "B", "A", "B", "C"]
    assert found.checklist[5:] == found.decisions.checklist
    # f is linear in x, and its spread is: five times as wide, exactly.
    far, same = found.checklist[0], found.checklist[2]
    assert far.passed
    assert not same.passed, "rows do not differ from themselves"
    assert found.checklist[1].number.startswith("3.219"), "log 25"
    assert not found.passed
    assert str(found).rstrip().endswith(str(found.checklist[-1]))
    assert found.shifts["wider"].index.unique("severity").tolist() == [0, 1]


def test_nothing_to_check_and_empty_sets_are_named(rows):
    model, posterior, validation, test = rows
    with pytest.raises(DataError, match="nothing to check"):
        check_posterior(model, posterior, validation, test, x_train=test[0])
    empty = {"near": torch.zeros(0, 2)}
    with pytest.raises(DataError, match="'near' has no rows"):
        check_posterior(model, posterior, validation, test, x_train=test[0], ood=empty)


def test_too_few_rows_pass_no_criterion(rows):
    """One row far away ranks above all: its AUROC is 1, and so are those of its resamples."""
    model, posterior, validation, test = rows
    options = {"x_train": test[0], "ood": {"far": 50 * test[0][:1]}}
    with pytest.warns(PbnnWarning, match=r"fewer than 10 rows: 'far' \(1\)"):
        found = check_posterior(model, posterior, validation, test, **options)
    assert [line.passed for line in found.checklist[:2]] == [False, False]
    assert "of too few rows (1)" in str(found.checklist[0])
    assert found.ood.verdict == "too few rows"
    few = (test[0][:9], test[1][:9])
    with pytest.warns(PbnnWarning, match=r"fewer than 10 rows: 'id' \(9\), 'far' \(1\)"):
        found = check_posterior(model, posterior, validation, few, **options)
    assert not any(line.passed for line in found.checklist)
