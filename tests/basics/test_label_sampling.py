import pytest
import torch
from hypothesis import given
from scipy import stats
from torch import Generator, nn

from kfs.basics.label_sampling import hide_ignored, sample_label
from kfs.errors import DtypeError, LossError, ShapeError
from tests.basics.cases import shapes

# Significance of the statistical tests below. The draws are seeded, so each test always passes or always fails.
LEVEL = 1e-3


def test_square_loss_draws_are_independent_standard_normals_around_the_prediction() -> None:
    f = torch.tensor([[0.5, -1.0], [2.0, 0.0]], dtype=torch.float64)
    generator = Generator().manual_seed(1)
    noise = torch.stack([sample_label(nn.MSELoss(), f, generator) - f for _ in range(2000)]).flatten(1).numpy()
    for entry in noise.T:
        assert stats.kstest(entry, "norm").pvalue > LEVEL
    for i in range(4):
        for j in range(i):
            assert stats.pearsonr(noise[:, i], noise[:, j]).pvalue > LEVEL


def test_cross_entropy_draws_follow_the_softmax_independently_at_every_position() -> None:
    f = torch.randn(3, 2, dtype=torch.float64)
    generator = Generator().manual_seed(1)
    draws = 4000
    y = torch.stack([sample_label(nn.CrossEntropyLoss(), f, generator) for _ in range(draws)])
    joint = torch.bincount(3 * y[:, 0] + y[:, 1], minlength=9)
    expected = draws * torch.outer(f.softmax(0)[:, 0], f.softmax(0)[:, 1]).flatten()
    assert stats.chisquare(joint, expected).pvalue > LEVEL
    # A softmax over positions instead of classes fails this test.
    wrong = torch.outer(f.softmax(1)[:, 0], f.softmax(1)[:, 1]).flatten()
    assert stats.chisquare(joint, draws * wrong / wrong.sum()).pvalue < LEVEL


@given(shape=shapes)
def test_shapes_and_dtypes(shape: tuple[int, ...]) -> None:
    for dtype in (torch.float32, torch.float64):
        f = torch.randn(shape, dtype=dtype, requires_grad=True)
        y = sample_label(nn.MSELoss(), f)
        assert (y.shape, y.dtype, y.requires_grad) == (f.shape, dtype, False)
        f = torch.randn(4, *shape, dtype=dtype, requires_grad=True)
        y = sample_label(nn.CrossEntropyLoss(), f)
        assert (y.shape, y.dtype, y.requires_grad) == (shape, torch.int64, False)
        assert 0 <= y.min() <= y.max() < 4


def test_a_generator_decides_alone() -> None:
    f = torch.randn(5)
    state = torch.get_rng_state()
    one, other = (sample_label(nn.MSELoss(), f, Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_missing_labels_stay_missing() -> None:
    target, drawn = torch.tensor([0, -100, 2]), torch.tensor([1, 1, 1])
    assert hide_ignored(nn.CrossEntropyLoss(), drawn, target).tolist() == [1, -100, 1]
    assert hide_ignored(nn.MSELoss(), drawn, target) is drawn
    assert hide_ignored(nn.CrossEntropyLoss(), drawn, torch.rand(4, 3)) is drawn


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (nn.CrossEntropyLoss(torch.ones(3)), "not the negative logarithm of a distribution"),
        (nn.CrossEntropyLoss(label_smoothing=0.1), "not the negative logarithm of a distribution"),
        (nn.CrossEntropyLoss(ignore_index=2), "ignore_index=2 is one of the 3 classes"),
        (nn.CrossEntropyLoss(reduction="none"), "reduction='none'"),
        (nn.L1Loss(), "MSELoss and CrossEntropyLoss"),
    ],
)
def test_losses_that_are_no_likelihood_are_refused(loss: nn.CrossEntropyLoss, message: str) -> None:
    with pytest.raises(LossError, match=message):
        sample_label(loss, torch.zeros(3))


def test_bad_predictions_and_generators_are_refused() -> None:
    with pytest.raises(ShapeError, match="one logit per class"):
        sample_label(nn.CrossEntropyLoss(), torch.tensor(0.0))
    with pytest.raises(DtypeError, match=r"prediction has dtype torch\.int64"):
        sample_label(nn.MSELoss(), torch.tensor([1, 2]))
    with pytest.raises(DtypeError, match=r"generator is a int.*manual_seed"):
        sample_label(nn.MSELoss(), torch.zeros(3), 0)  # type: ignore[arg-type]
    with pytest.raises(DtypeError, match="generator is on cpu, but the prediction is on meta"):
        sample_label(nn.MSELoss(), torch.zeros(3, device="meta"), Generator())
