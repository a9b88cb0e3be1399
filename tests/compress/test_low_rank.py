"""Low rank: the best approximation in the metric, stored as two plain layers."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kfs
from kfs.compress import low_rank, prune
from kfs.compress.factorization import chosen, decomposed, lower_hull
from kfs.compress.layers import layers_of
from kfs.factors import optimal_kronecker
from tests.compress.problems import cnn, flat, image_risk, mlp, mlp_risk


def root(M: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(M)
    result: Tensor = (vectors * values.sqrt()) @ vectors.T
    return result


def matrix_of(module: Any) -> Tensor:
    """Return weight and bias of a linear layer, or of two consecutive ones, as one matrix: multiply unit vectors."""
    first: Any = module[0] if isinstance(module, nn.Sequential) else module
    size = first.in_features
    units = torch.eye(size, dtype=torch.float64)
    zero = module(torch.zeros(1, size, dtype=torch.float64)).detach()
    return torch.cat([(module(units).detach() - zero).T, zero.T], dim=1)


@pytest.mark.parametrize("rank", [1, 2])
def test_no_other_matrix_of_this_rank_is_better(rank: int) -> None:
    model = mlp()
    K = kfs.KFAC(mlp_risk(model))
    per_rank = 5 + 7
    small, report = low_rank(model, K, {"0": rank * per_rank / 35}, damping=0.0)
    assert [row.matrix for row in report.rows] == [f"rank {rank}"]
    block = K.blocks["0"]
    W, V = block.matrix(dict(model.named_parameters())).detach(), matrix_of(small[0])  # type: ignore[index]
    white = root(block.B) @ W @ root(block.A)
    U, s, Vh = torch.linalg.svd(white, full_matrices=False)
    best = torch.linalg.inv(root(block.B)) @ (U[:, :rank] * s[:rank]) @ Vh[:rank] @ torch.linalg.inv(root(block.A))
    torch.testing.assert_close(V, best, rtol=1e-9, atol=1e-10)

    dense = torch.kron(block.B, block.A)

    def lost(M: Tensor) -> float:
        change = (M - W).flatten()
        return float(0.5 * change @ dense @ change)

    assert report.rows[0].increase == pytest.approx(lost(V), rel=1e-9)
    assert lost(V) == pytest.approx(0.5 * float(s[rank:].square().sum()), rel=1e-9)
    plain_U, plain_s, plain_V = torch.linalg.svd(W, full_matrices=False)
    others = [(plain_U[:, :rank] * plain_s[:rank]) @ plain_V[:rank]]  # the decomposition without a metric
    left, right = U[:, :rank] * s[:rank], Vh[:rank]
    for scale in (1.0, 0.1, 0.01, 0.001):
        for _ in range(20):  # any other two factors
            near = (left + scale * torch.randn_like(left)) @ (right + scale * torch.randn_like(right))
            others.append(torch.linalg.inv(root(block.B)) @ near @ torch.linalg.inv(root(block.A)))
    assert all(lost(M) > lost(V) for M in others)


def test_damping_is_factored() -> None:
    model = mlp()
    K = kfs.KFAC(mlp_risk(model))
    small, _ = low_rank(model, K, {"0": 24 / 35}, damping=kfs.Relative(0.04))
    block = K.blocks["0"]
    W = block.matrix(dict(model.named_parameters())).detach()
    A = block.A + 0.2 * block.A.diagonal().mean() * torch.eye(7, dtype=torch.float64)
    B = block.B + 0.2 * block.B.diagonal().mean() * torch.eye(5, dtype=torch.float64)
    U, s, Vh = torch.linalg.svd(root(B) @ W @ root(A), full_matrices=False)
    best = torch.linalg.inv(root(B)) @ (U[:, :2] * s[:2]) @ Vh[:2] @ torch.linalg.inv(root(A))
    torch.testing.assert_close(matrix_of(small[0]), best, rtol=1e-9, atol=1e-10)  # type: ignore[index]


@pytest.mark.parametrize(
    "settings",
    [{}, {"stride": 2, "padding": 1}, {"dilation": 2, "padding": 2, "padding_mode": "circular"}, {"padding": "same"}],
    ids=str,
)
def test_convolutions_become_two(settings: dict[str, Any]) -> None:
    model = cnn(**settings)
    K = kfs.KFAC(image_risk(model))
    images = torch.randn(3, 2, 7, 6, dtype=torch.float64)
    small, report = low_rank(model, K, {"3": 0.5}, sample=images)
    first, second = small[3]  # type: ignore[index]
    assert first.kernel_size == (3, 3)
    assert second.kernel_size == (1, 1)
    rank = first.out_channels
    assert rank * (4 * 9 + 1 + 6) <= 0.5 * 6 * 37 < (rank + 1) * (4 * 9 + 1 + 6)
    same = cnn(**settings)
    same.load_state_dict(model.state_dict())
    with torch.no_grad():  # both layers multiplied
        product = second.weight.flatten(1) @ torch.cat([first.weight.flatten(1), first.bias.unsqueeze(1)], dim=1)
        same[3].weight.copy_(product[:, :-1].reshape(6, 4, 3, 3))  # type: ignore[index]
        same[3].bias.copy_(product[:, -1])  # type: ignore[index]
    torch.testing.assert_close(small(images), same(images), rtol=1e-11, atol=1e-12)
    parameters = sum(p.numel() for p in small.parameters())
    assert parameters == report.parameters_after == report.stored_after
    assert report.flops_before is not None
    assert report.flops_after is not None
    assert report.flops_after < report.flops_before


@pytest.mark.parametrize("dims", [1, 3])
def test_other_convolutions(dims: int) -> None:
    kind = {1: nn.Conv1d, 3: nn.Conv3d}[dims]
    model = nn.Sequential(kind(2, 8, 3), nn.Flatten(), nn.LazyLinear(2)).double().eval()
    images = torch.randn(10, 2, *[4] * dims, dtype=torch.float64)
    model(images)
    K = kfs.KFAC(kfs.EmpiricalRisk(model, nn.MSELoss(), (images, torch.randn(10, 2, dtype=torch.float64))))
    small, _ = low_rank(model, K, {"0": 0.9})
    assert isinstance(small[0][0], kind)  # type: ignore[index]
    assert small(images).shape == (10, 2)


def test_a_bias_with_a_block_of_its_own_is_added_at_the_end() -> None:
    model = mlp()
    K = kfs.KFAC(mlp_risk(model), joint_bias=False)
    small, _ = low_rank(model, K, {"0": 22 / 30})
    first, second = small[0]  # type: ignore[index]
    assert first.bias is None
    assert torch.equal(second.bias, model[0].bias)  # type: ignore[index]


def test_layers_without_bias_stay_without() -> None:
    model = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 7)).double().eval()
    small, _ = low_rank(model, kfs.KFAC(mlp_risk(model)), {"0": 22 / 30})
    assert [layer.bias for layer in small[0]] == [None, None]  # type: ignore[index]


def test_modes_and_flags_are_taken_over() -> None:
    model = mlp().train()
    K = kfs.KFAC(mlp_risk(model))
    model[0].weight.requires_grad_(False)  # type: ignore[index]
    small, _ = low_rank(model, K, {"0": 24 / 35})
    assert small[0][1].training  # type: ignore[index]
    assert not small[0][0].weight.requires_grad  # type: ignore[index]
    assert small[0][0].bias.requires_grad  # type: ignore[index]
    assert small[2].weight.requires_grad  # type: ignore[index]


@pytest.mark.parametrize("make", [mlp, cnn])
def test_random_numbers_of_the_caller_stay(make: Any) -> None:
    """New layers draw no initial values."""
    model = make()
    K = kfs.KFAC(mlp_risk(model) if make is mlp else image_risk(model))
    before = torch.get_rng_state()
    low_rank(model, K, 0.5)
    prune(model, K, 0.5, basis="eigen", structured=True)
    assert torch.equal(torch.get_rng_state(), before)


def test_layers_compete_and_all_is_kept_to_the_last_bit() -> None:
    model = mlp()
    K = kfs.KFAC(mlp_risk(model))
    small, report = low_rank(model, K, 0.6)
    kept = sum(p.numel() for p in small.parameters())
    assert kept == report.parameters_after <= 0.6 * 77
    same, report = low_rank(model, K, 1.0, damping=0.0)
    assert torch.equal(flat(same, K.domain.shapes), flat(model, K.domain.shapes))
    assert {row.form for row in report.rows} == {"unchanged"}


def test_the_root_of_a_model_may_be_a_layer() -> None:
    model = nn.Linear(6, 7).double()
    small, _ = low_rank(model, kfs.KFAC(mlp_risk(model)), 0.6)
    assert isinstance(small, nn.Sequential)
    assert len(small) == 2


def test_other_kronecker_products_and_factors_of_ekfac() -> None:
    model = mlp()
    risk = mlp_risk(model)
    E = kfs.EKFAC(risk)
    one, other = low_rank(model, E, 0.6).model, low_rank(model, E.factors, 0.6).model
    assert torch.equal(flat(one, one.state_dict()), flat(other, other.state_dict()))
    best = low_rank(model, optimal_kronecker(risk), 0.6).model
    assert best(torch.zeros(1, 6, dtype=torch.float64)).shape == (1, 7)


def test_choices_are_the_best_at_their_size() -> None:
    """By brute force over all combinations of options."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        options = []
        for _ in range(3):
            steps = torch.rand(4, generator=generator).cumsum(0) ** 2
            sizes = torch.randint(1, 6, (4,), generator=generator).cumsum(0).flip(0).tolist()
            options.append([(21, 0.0), *zip(sizes, steps.tolist(), strict=True)])
        for budget in range(sum(of_layer[-1][0] for of_layer in options), 64):
            places = chosen(options, budget)
            taken = [of_layer[place] for of_layer, place in zip(options, places, strict=True)]
            size, total = sum(size for size, _ in taken), sum(cost for _, cost in taken)
            assert size <= budget
            if all(place in lower_hull(of_layer) for of_layer, place in zip(options, places, strict=True)):
                same = [combination for combination in product(*options) if sum(s for s, _ in combination) <= size]
                assert total <= min(sum(c for _, c in combination) for combination in same) + 1e-12


def test_costs_of_options() -> None:
    """Layers compete by the increase of the quadratic model per rank, and by the numbers that are saved."""
    model = mlp()
    K = kfs.KFAC(mlp_risk(model))
    for layer in layers_of(model, K, 0.5, 0.0):
        part = decomposed(layer)
        (size, cost), *options = part.options
        assert (size, cost) == (layer.size, 0.0)
        for rank, (size, cost) in zip(part.ranks, options, strict=True):
            small, report = low_rank(model, K, {layer.name: size / layer.size}, damping=0.0)
            assert report.rows[0].matrix == f"rank {rank}"
            assert size == sum(p.numel() for p in small.get_submodule(layer.name).parameters())
            change = matrix_of(small.get_submodule(layer.name)) - layer.matrix[0]
            C = torch.kron(K.blocks[layer.name].B, K.blocks[layer.name].A)
            assert cost == pytest.approx(float(0.5 * change.flatten() @ C @ change.flatten()), rel=1e-8)


def test_no_more_is_removed_than_needed() -> None:
    """Within the last step along the hull, the cheapest choice is the largest option that fits."""
    options = [[(10, 0.0), (9, 5.0), (8, 5.5), (2, 6.0)]]
    assert lower_hull(options[0]) == [0, 3]
    assert [chosen(options, budget) for budget in (9, 8, 7)] == [[1], [2], [3]]
