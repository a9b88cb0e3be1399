"""Jacobian products, Jacobians, and the Jacobians of linear layers."""

from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from torch import func, nn

from kfs.basics.flattening import Vec, cvec, rvec
from kfs.basics.jacobian_products import jvp, vjp
from kfs.basics.jacobians import jacobian, vec_jacobian
from kfs.basics.jacobians_linear_layer import append_one, linear_layer_jacobian
from kfs.basics.jacobians_shared_linear_layer import shared_linear_layer_jacobian
from kfs.errors import DtypeError, FlatteningError, GraphError, ShapeError
from tests.basics.cases import assert_close, leaf, shapes, smooth_function


@given(in_shape=shapes, out_shape=shapes)
def test_products_and_jacobian_are_those_of_torch_func(in_shape: tuple[int, ...], out_shape: tuple[int, ...]) -> None:
    f, a = smooth_function(in_shape, out_shape), leaf(in_shape)
    b = f(a)
    v = torch.randn_like(b)
    assert_close(vjp(b, a, v), func.vjp(f, a.detach())[1](v)[0])
    u = torch.randn_like(a)
    assert_close(jvp(b, a, u), func.jvp(f, (a.detach(),), (u,))[1])
    assert_close(jacobian(b, a), func.jacfwd(f)(a.detach()))


@given(in_shape=shapes, out_shape=shapes)
def test_jacobian_agrees_with_finite_differences(in_shape: tuple[int, ...], out_shape: tuple[int, ...]) -> None:
    f, a = smooth_function(in_shape, out_shape), leaf(in_shape)
    J, step = jacobian(f(a), a), 1e-5
    for index in np.ndindex(*in_shape):
        e = torch.zeros_like(a)
        e[index] = step
        difference = (f(a.detach() + e) - f(a.detach() - e)) / (2 * step)
        # Central differences err by step^2 times a third derivative of size one, and by eps / step from rounding.
        assert_close(J[(..., *index)], difference, atol=1e-8)


@pytest.mark.parametrize(("vec", "order"), [(cvec, "F"), (rvec, "C")])
@given(in_shape=shapes, out_shape=shapes)
def test_matrices_are_flattened_tensors(
    vec: Vec, order: Literal["C", "F"], in_shape: tuple[int, ...], out_shape: tuple[int, ...]
) -> None:
    f, a = smooth_function(in_shape, out_shape), leaf(in_shape)
    b = f(a)
    J = func.jacrev(f)(a.detach()).numpy()
    matrix = np.reshape(J, (b.numel(), a.numel()), order=order)
    assert_close(vec_jacobian(b, a, vec), torch.from_numpy(matrix.copy()))


def test_intermediate_tensors_can_be_differentiated() -> None:
    x = leaf((3,))
    h = torch.sin(x)
    b = h**2
    assert_close(jacobian(b, h), torch.diag(2 * h).detach())
    assert_close(jvp(b, h, torch.ones_like(h)), 2 * h.detach())


def test_products_leave_gradients_and_graph_alone() -> None:
    a = leaf((3,))
    b = a**3
    for _ in range(2):
        vjp(b, a, torch.ones_like(b))
        jvp(b, a, torch.ones_like(a))
    assert a.grad is None
    b.sum().backward()
    assert_close(a.grad, 3 * a.detach() ** 2)  # type: ignore[arg-type]


def test_results_can_be_differentiated_on_request() -> None:
    a, v = leaf((3,)), leaf((3,))
    b = a**3
    assert not vjp(b, a, torch.ones_like(b)).requires_grad
    gradient = vjp(b, a, torch.ones_like(b), create_graph=True)
    assert_close(jacobian(gradient, a), torch.diag(6 * a).detach())
    assert_close(jacobian(jvp(b, a, v), v), torch.diag(3 * a**2).detach())


def test_a_function_without_slope_has_zero_products() -> None:
    a = leaf((3,))
    b = torch.sign(a)
    assert_close(jvp(b, a, torch.ones_like(a)), torch.zeros(3, dtype=torch.float64))
    assert_close(jacobian(b, a), torch.zeros(3, 3, dtype=torch.float64))


@pytest.mark.parametrize("product", [vjp, jvp])
def test_bad_tensors_are_refused(product: Any) -> None:
    a = leaf((3,))
    b = (a**2).sum(0, keepdim=True).expand(2)
    v = torch.randn(2 if product is vjp else 3, dtype=torch.float64)
    like = "b" if product is vjp else "a"

    with pytest.raises(ShapeError, match=rf"v has shape \[1\], but {like} has shape"):
        product(b, a, v[:1])
    with pytest.raises(DtypeError, match=rf"v is torch\.float32 on cpu, but {like} is torch\.float64"):
        product(b, a, v.float())
    with pytest.raises(DtypeError, match=r"v is a list, expected a torch\.Tensor"):
        product(b, a, [1.0])
    with pytest.raises(DtypeError, match=r"a has dtype torch\.int64, but derivatives exist only"):
        product(b, torch.tensor([1, 2, 3]), v)
    with pytest.raises(DtypeError, match=r"b has dtype torch\.int64"):
        product(torch.tensor([1, 2]), a, v)
    with pytest.raises(GraphError, match="a is not part of a computation graph"):
        product(b, a.detach(), v)
    with pytest.raises(GraphError, match=r"b is not part of a computation graph.*requires_grad_\(\)"):
        product(b.detach(), a, v)
    with pytest.raises(GraphError, match="b was not computed from a"):
        product(b, leaf((3,)), v)
    with pytest.raises(GraphError, match="not a copy, a slice or a detached version"):
        product(b, a[:], v)


def test_a_freed_graph_is_named_as_the_cause() -> None:
    a = leaf((3,))
    b = torch.sin(a).exp()
    b.sum().backward()
    with pytest.raises(GraphError, match=r"freed by an earlier backward pass.*retain_graph=True"):
        vjp(b, a, torch.ones_like(b))


def test_an_overwritten_graph_is_named_as_the_cause() -> None:
    a = leaf((3,))
    b = torch.exp(a)
    with torch.no_grad():
        b.add_(1)  # exp needs its output for the backward pass
    with pytest.raises(GraphError, match="overwritten since the forward pass") as error:
        vjp(b, a, torch.ones_like(b))
    assert "modified by an inplace operation" in str(error.value.__cause__)


class Opaque(torch.autograd.Function):
    """A cube whose backward pass hides that it depends on its input, or raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fail: bool) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.fail = fail
        return x**3

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.fail:
            raise RuntimeError("backward failed on purpose")
        return (3 * ctx.saved_tensors[0] ** 2 * g).detach(), None


def test_backward_passes_that_cannot_be_differentiated_are_refused() -> None:
    a = leaf((3,))
    b = Opaque.apply(a, False)  # type: ignore[no-untyped-call]
    assert_close(vjp(b, a, torch.ones_like(b)), 3 * a.detach() ** 2)
    with pytest.raises(GraphError, match="cannot be differentiated"):
        jvp(b, a, torch.ones_like(a))


def test_other_errors_pass_through() -> None:
    a = leaf((3,))
    b = Opaque.apply(a, True)  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="failed on purpose"):
        vjp(b, a, torch.ones_like(b))


def test_attention_without_second_derivative_is_refused_with_advice() -> None:
    q = torch.randn(1, 1, 4, 8, requires_grad=True)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        b = nn.functional.scaled_dot_product_attention(q, q, q)
    with pytest.raises(GraphError, match=r"no second derivative.*SDPBackend\.MATH"):
        jvp(b, q, torch.ones_like(q))


def test_inference_mode_is_refused() -> None:
    a = leaf((3,))
    b = a**2
    with torch.inference_mode(), pytest.raises(GraphError, match=r"inference_mode.*no_grad\(\) instead"):
        jvp(b, a, torch.ones(3, dtype=torch.float64))


def test_tensors_with_hooks_are_refused() -> None:
    a = leaf((3,))
    b = 3 * a
    hook = a.register_hook(lambda g: g.clamp(-0.1, 0.1))
    with pytest.raises(GraphError, match="a has hooks, which may change the derivatives"):
        jacobian(b, a)
    hook.remove()
    assert_close(jacobian(b, a), 3 * torch.eye(3, dtype=torch.float64))


def test_retained_gradients_are_not_written() -> None:
    a = leaf((3,))
    b = a**2
    b.retain_grad()
    b.grad = torch.ones(3, dtype=torch.float64)
    vjp(b, a, torch.ones_like(b))
    jvp(b, a, torch.ones_like(a))
    assert torch.equal(b.grad, torch.ones(3, dtype=torch.float64))


def test_devices_must_agree() -> None:
    a = leaf((3,))
    with pytest.raises(DtypeError, match="on meta, but b is"):
        vjp(a**2, a, torch.ones(3, dtype=torch.float64, device="meta"))


@pytest.mark.parametrize(("vec", "order"), [(cvec, "F"), (rvec, "C")])
def test_linear_layers_have_kronecker_jacobians(vec: Vec, order: Literal["C", "F"]) -> None:
    layer, X = nn.Linear(3, 2).double(), torch.randn(3, 4, dtype=torch.float64)

    def joint(W_joint: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(X.T, W_joint[:, :-1], W_joint[:, -1]).T  # the layer's own operation, columns again

    W_joint = torch.cat([layer.weight, layer.bias.unsqueeze(1)], 1).detach()
    J = np.reshape(func.jacrev(joint)(W_joint).numpy(), (8, 8), order=order)
    assert_close(shared_linear_layer_jacobian(append_one(X), 2, vec), torch.from_numpy(J.copy()))

    x = X[:, 0]
    J = func.jacrev(lambda W: nn.functional.linear(x, W[:, :-1], W[:, -1]))(W_joint).numpy()
    J = np.reshape(J, (2, 8), order=order)
    assert_close(linear_layer_jacobian(append_one(x), 2, vec), torch.from_numpy(J.copy()))


def test_bad_input_of_the_closed_forms_is_refused() -> None:
    with pytest.raises(ShapeError, match="x is a scalar"):
        append_one(torch.tensor(1.0))
    with pytest.raises(ShapeError, match="expected a vector"):
        linear_layer_jacobian(torch.zeros(2, 2), 3, cvec)
    with pytest.raises(ShapeError, match="expected a matrix"):
        shared_linear_layer_jacobian(torch.zeros(2), 3, cvec)
    for call in (linear_layer_jacobian, shared_linear_layer_jacobian):
        with pytest.raises(FlatteningError, match="cvec and rvec"):
            call(torch.zeros(2), 3, "fvec")  # type: ignore[arg-type]
    a = leaf((2,))
    with pytest.raises(FlatteningError, match="cvec and rvec"):
        vec_jacobian(a**2, a, torch.flatten)  # type: ignore[arg-type]
