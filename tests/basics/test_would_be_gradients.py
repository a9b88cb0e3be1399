import pytest
import torch
from torch import Generator, Tensor, func, nn

from kfs.basics.flattening import rvec
from kfs.basics.jacobians import vec_jacobian
from kfs.basics.label_sampling import sample_label
from kfs.basics.mc_fishers import vec_mc_fisher
from kfs.basics.reduction_factors import Loss, criterion, reduction_factor
from kfs.basics.would_be_gradients import criterion_gradient, would_be_gradients
from kfs.errors import DataError, LossError, ShapeError
from tests.basics.cases import LIKELIHOODS, Case, assert_close

LOSSES: list[Loss] = [nn.MSELoss(), nn.CrossEntropyLoss(reduction="sum")]
SHAPES = [(4,), (3, 2), (2, 1, 3)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_gradients_for_drawn_labels_are_those_of_torch_func(loss: Loss, shape: tuple[int, ...]) -> None:
    f = torch.randn(shape, dtype=torch.float64)
    for seed in range(5):
        y = sample_label(loss, f, Generator().manual_seed(seed))
        assert_close(criterion_gradient(loss, f, y), func.grad(criterion(loss))(f, y))
    assert not torch.allclose(criterion_gradient(loss, f, y), -func.grad(criterion(loss))(f, y))  # the sign matters


@pytest.mark.parametrize("case", LIKELIHOODS, ids=str)
def test_gradients_for_the_data(case: Case) -> None:
    """Missing labels and probabilities are included."""
    model, loss, X, y = case.make()
    for f_n, y_n in zip(model(X).detach(), y, strict=True):
        assert_close(criterion_gradient(loss, f_n, y_n), func.grad(criterion(loss))(f_n, y_n))


def test_a_missing_label_has_no_gradient() -> None:
    f, y = torch.randn(3, 2, dtype=torch.float64), torch.tensor([-100, 1])
    g = criterion_gradient(nn.CrossEntropyLoss(), f, y)
    assert_close(g[:, 0], torch.zeros(3, dtype=torch.float64))
    assert g[:, 1].abs().min() > 0


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_draws_are_those_of_the_sampler(loss: Loss) -> None:
    f = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    S = would_be_gradients(loss, f, 4, Generator().manual_seed(3))
    generator = Generator().manual_seed(3)
    expected = [criterion_gradient(loss, f, sample_label(loss, f, generator)) for _ in range(4)]
    assert_close(S, torch.stack(expected, -1))
    assert not S.requires_grad
    torch.manual_seed(0)
    one = would_be_gradients(loss, f)
    torch.manual_seed(0)
    assert_close(one, criterion_gradient(loss, f, sample_label(loss, f)).unsqueeze(-1))


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_backpropagated_they_give_the_monte_carlo_fisher(loss: Loss) -> None:
    M, seed = 3, 5
    model = nn.Linear(3, 2).double()
    X = torch.randn(4, 3, dtype=torch.float64)
    y: Tensor = torch.randn(4, 2).double() if isinstance(loss, nn.MSELoss) else torch.randint(2, (4,))
    generator = Generator().manual_seed(seed)
    V = []
    for x in X:
        f = model(x)
        V.append(vec_jacobian(f, model.weight, rvec).T @ would_be_gradients(loss, f, M, generator))
    columns = torch.cat(V, dim=1)
    F = reduction_factor(loss, y) / M * columns @ columns.T
    assert_close(F, vec_mc_fisher(model, loss, X, y, "weight", M, seed))


def test_bad_input_is_refused() -> None:
    f = torch.zeros(3)
    with pytest.raises(LossError, match="not the negative logarithm"):
        criterion_gradient(nn.CrossEntropyLoss(label_smoothing=0.1), f, torch.tensor(0))
    with pytest.raises(DataError, match="Labels go from 3 to 3"):
        criterion_gradient(nn.CrossEntropyLoss(), f, torch.tensor(3))
    with pytest.raises(ShapeError, match="so one example's target has shape"):
        criterion_gradient(nn.MSELoss(), f, torch.zeros(2))
    with pytest.raises(DataError, match="mc_samples is 0"):
        would_be_gradients(nn.MSELoss(), f, 0)
