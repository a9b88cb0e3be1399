"""The paper's tests notice mistakes in the listings that they test, and in their own comparisons."""

import sys
from contextlib import redirect_stdout
from importlib import import_module
from io import StringIO
from pathlib import Path
from types import ModuleType

import pytest
from torch.random import fork_rng

from kfs.errors import VerificationError
from kfs.kfac import (
    backpropagated_vectors,
    ekfac_Linear,
    expand_Conv,
    expand_Linear,
    expectation_approximation,
    reduce_Conv,
    reduce_Linear,
    scaffold,
    sum_of_kronecker_products,
)
from kfs.kfac_tests import (
    _checks,
    deep_linear_regression,
    mlp_batch_size_1,
    weight_sharing_expand,
    weight_sharing_reduce,
)
from tests.edits import failure

TESTS = (mlp_batch_size_1, deep_linear_regression, weight_sharing_expand, weight_sharing_reduce)
FOLDERS = ("kfs.kfac.", "kfs.kfac_tests.")
TYPE2, CONVERGES = "False: KFAC-type-II equals the GGN", "False: KFAC-MC converges"
EXPAND, REDUCE = "False: KFAC-expand equals the GGN", "False: KFAC-reduce equals the GGN"
EMPIRICAL = "False: KFAC-empirical equals the empirical Fisher"
# Test, edited module, text to replace, its replacement, and the first claim that becomes false.
LISTINGS = [
    (mlp_batch_size_1, scaffold, "R * A[name]", "A[name]", TYPE2),
    (mlp_batch_size_1, scaffold, "R = reduction_factor(loss, y)", "R = 1 / len(y)", TYPE2),
    (mlp_batch_size_1, scaffold, "bias=layer.bias is not None", "bias=False", TYPE2),
    (mlp_batch_size_1, backpropagated_vectors, ".movedim(-1, 0)", "", TYPE2),
    (mlp_batch_size_1, backpropagated_vectors, " / sqrt(mc_samples)", "", CONVERGES),
    (mlp_batch_size_1, backpropagated_vectors, " / sqrt(mc_samples)", " / mc_samples", CONVERGES),
    (mlp_batch_size_1, backpropagated_vectors, "(loss, f_n, label)[0]", "(loss, f_n, y_n)[0]", CONVERGES),
    (mlp_batch_size_1, backpropagated_vectors, "return gradient.", "return gradient.abs().", EMPIRICAL),
    (mlp_batch_size_1, expand_Linear, "append_one(x[n, s]) if", "append_one(0 * x[n, s]) if", TYPE2),
    (mlp_batch_size_1, expand_Linear, "for c in range(C)", "for c in range(1)", TYPE2),
    (deep_linear_regression, scaffold, "R = reduction_factor(loss, y)", "R = 1 / len(y)", TYPE2),
    (deep_linear_regression, expand_Linear, "B / (N * S)", "B / S", TYPE2),
    (deep_linear_regression, expand_Linear, "A += outer(x_ns, x_ns)", "A = outer(x_ns, x_ns)", TYPE2),
    (deep_linear_regression, backpropagated_vectors, "in range(mc_samples)", "in range(1)", CONVERGES),
    (weight_sharing_expand, scaffold, "R = reduction_factor(loss, y)", "R = 1 / len(y)", EXPAND),
    (weight_sharing_expand, scaffold, "RULES[sharing]", 'RULES["reduce"]', EXPAND),
    (weight_sharing_expand, expand_Linear, "B / (N * S)", "B / N", EXPAND),
    (weight_sharing_reduce, scaffold, "R = reduction_factor(loss, y)", "R = 1 / len(y)", REDUCE),
    (weight_sharing_reduce, scaffold, "RULES[sharing]", 'RULES["expand"]', REDUCE),
    (weight_sharing_reduce, reduce_Linear, "B / (N * S**2)", "B / (N * S)", REDUCE),
    (weight_sharing_reduce, reduce_Linear, "append_one(x[n, s]) if", "append_one(x[n, s] / S) if", REDUCE),
    (mlp_batch_size_1, _checks, "= self.W[:, d_in]", "= 0 * self.W[:, d_in]", TYPE2),
]
# Mistakes in the tests themselves.
ORDER = ("if vec is cvec else", "if vec is rvec else")
TEXTS = [
    *((test, *ORDER, claim) for test, claim in zip(TESTS, (TYPE2, TYPE2, EXPAND, REDUCE), strict=True)),
    (mlp_batch_size_1, "kron(A, B)", "kron(A, B.T @ B)", TYPE2),
    (mlp_batch_size_1, "kfac(model, loss, X, y, empirical_vectors)", "type2", EMPIRICAL),
    (mlp_batch_size_1, "mc_samples=M", "mc_samples=4", CONVERGES),
    (deep_linear_regression, "mc_samples=M", "mc_samples=4", CONVERGES),
    (weight_sharing_expand, 'y, sharing="expand")', 'y, sharing="reduce")', EXPAND),
    (weight_sharing_reduce, 'y, sharing="reduce")', 'y, sharing="expand")', REDUCE),
    (weight_sharing_reduce, 'loss, X, y, vectors, "reduce")', 'loss, X, y, vectors, "expand")', CONVERGES),
]
# In these listings, the verification code passes the reduction factor. For some losses and sizes, it is 1 / N.
USERS_OF_R = (
    sum_of_kronecker_products,
    expectation_approximation,
    expand_Linear,
    reduce_Linear,
    expand_Conv,
    reduce_Conv,
    ekfac_Linear,
)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the next program import all listings again; undo that afterwards."""
    for name in [name for name in sys.modules if name.startswith(FOLDERS)]:
        folder, _, short = name.rpartition(".")
        monkeypatch.setattr(sys.modules[folder], short, sys.modules[name])
        monkeypatch.delitem(sys.modules, name)


def edited(module: ModuleType, right: str, wrong: str) -> str:
    """Return the source of a module with one edit."""
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    assert "\n" not in right + wrong
    assert source.count(right) == 1, f"{right!r} occurs {source.count(right)} times."
    return source.replace(right, wrong)


@pytest.mark.parametrize(("test", "listing", "right", "wrong", "claim"), LISTINGS)
@pytest.mark.usefixtures("fresh")
def test_an_edit_of_a_listing_is_noticed(
    test: ModuleType, listing: ModuleType, right: str, wrong: str, claim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = ModuleType(listing.__name__)
    copy.__file__ = listing.__file__
    folder, _, short = listing.__name__.rpartition(".")
    monkeypatch.setitem(sys.modules, listing.__name__, copy)
    monkeypatch.setattr(import_module(folder), short, copy)
    exec(edited(listing, right, wrong), copy.__dict__)
    assert (failure(test) or "").startswith(claim)


def run(source: str) -> str | None:
    """Run a program; return the claim that it reported as false."""
    with redirect_stdout(StringIO()), fork_rng(devices=[]):
        try:
            exec(source, {"__name__": "__main__"})
        except VerificationError as error:
            return str(error)
    return None


@pytest.mark.parametrize(("test", "right", "wrong", "claim"), TEXTS)
def test_an_edit_of_a_test_is_noticed(test: ModuleType, right: str, wrong: str, claim: str) -> None:
    assert (run(edited(test, right, wrong)) or "").startswith(claim)


@pytest.mark.parametrize("listing", USERS_OF_R, ids=lambda listing: listing.__name__)
def test_checks_see_the_reduction_factor(listing: ModuleType) -> None:
    assert "False: " in (run(edited(listing, "reduction_factor(loss, y)", "1 / len(y)")) or "")
