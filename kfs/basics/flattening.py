r"""Flattening: how a tensor becomes a vector, and back.

Linear algebra is about vectors and matrices, but the parameters of a neural network are
tensors of any rank. To write a derivative as a matrix, we must first fix an order of a
tensor's entries. Two orders are common. They are named after their effect on a matrix:

- $\mathrm{cvec}$ stacks the *columns*: the **first** index varies fastest. Papers
  prefer it.
- $\mathrm{rvec}$ stacks the *rows*: the **last** index varies fastest. PyTorch stores
  tensors this way.

$$
A = \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
\qquad
\mathrm{cvec}(A) = \begin{pmatrix} 1 \\ 3 \\ 2 \\ 4 \end{pmatrix}
\qquad
\mathrm{rvec}(A) = \begin{pmatrix} 1 \\ 2 \\ 3 \\ 4 \end{pmatrix}
$$

Neither is better. But a formula that holds for one is wrong for the other, usually by
the order of two Kronecker factors: for $A \in \mathbb{R}^{n_1 \times n_2}$ and
$B \in \mathbb{R}^{m_1 \times m_2}$,

$$
(A \otimes B)\, v = \mathrm{cvec}(B V A^\top),
\qquad V = \mathrm{cvec}^{-1}(v) \in \mathbb{R}^{m_2 \times n_2},
$$

$$
(A \otimes B)\, v = \mathrm{rvec}(A V B^\top),
\qquad V = \mathrm{rvec}^{-1}(v) \in \mathbb{R}^{n_2 \times m_2}.
$$

Flattening only some neighboring axes, first those that index rows and then those that
index columns, turns a tensor into a matrix. This is called *matricization*; all
matrices in this package come from it.

Implements: cvec, rvec and partial flattening (chapter 2, "Flattening").
"""

from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias

from torch import Tensor

from kfs.basics._checks import axis_range, check_tensor, unflattened_axis
from kfs.errors import FlatteningError


class VecFunction(Protocol):
    """One of the functions `cvec` and `rvec`."""

    def __call__(self, t: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
        """Flatten the axes from `start_dim` to `end_dim`, both included."""
        ...


# A flattening: `cvec` or `rvec`, the function or its name.
Vec: TypeAlias = VecFunction | Literal["cvec", "rvec"]


def cvec(t: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """Flatten axes such that the first of them varies fastest.

    Args:
        t: A tensor of any rank; a scalar becomes a vector with one entry.
        start_dim: The first axis to flatten.
        end_dim: The last axis to flatten (included).

    Returns:
        `t` with the axes replaced by one; a vector by default.

    Example:
        >>> import torch
        >>> cvec(torch.tensor([[1, 2], [3, 4]]))
        tensor([1, 3, 2, 4])
    """
    start, end = axis_range("t", t, start_dim, end_dim)
    axes = list(range(t.ndim))
    axes[start : end + 1] = reversed(axes[start : end + 1])
    return t.permute(axes).flatten(start, end)


def rvec(t: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """Flatten axes such that the last of them varies fastest.

    Args:
        t: A tensor of any rank; a scalar becomes a vector with one entry.
        start_dim: The first axis to flatten.
        end_dim: The last axis to flatten (included).

    Returns:
        `t` with the axes replaced by one; a vector by default.

    Example:
        >>> import torch
        >>> rvec(torch.tensor([[1, 2], [3, 4]]))
        tensor([1, 2, 3, 4])
    """
    start, end = axis_range("t", t, start_dim, end_dim)
    return t.flatten(start, end)


def unflatten_cvec(v: Tensor, shape: Sequence[int], dim: int = 0) -> Tensor:
    """Undo `cvec`: `unflatten_cvec(cvec(t), t.shape)` equals `t`.

    Args:
        v: A vector, or a tensor of which one axis is a flattened one.
        shape: The shape that the axis had before.
        dim: That axis.

    Returns:
        `v` with the axis replaced by axes of the given shape.
    """
    dim = unflattened_axis(v, shape, dim)
    t = v.reshape((*v.shape[:dim], *reversed(shape), *v.shape[dim + 1 :]))
    axes = list(range(t.ndim))
    axes[dim : dim + len(shape)] = reversed(axes[dim : dim + len(shape)])
    return t.permute(axes)


def unflatten_rvec(v: Tensor, shape: Sequence[int], dim: int = 0) -> Tensor:
    """Undo `rvec`: `unflatten_rvec(rvec(t), t.shape)` equals `t`.

    Args:
        v: A vector, or a tensor of which one axis is a flattened one.
        shape: The shape that the axis had before.
        dim: That axis.

    Returns:
        `v` with the axis replaced by axes of the given shape.
    """
    dim = unflattened_axis(v, shape, dim)
    return v.reshape((*v.shape[:dim], *shape, *v.shape[dim + 1 :]))


def matricize(t: Tensor, row_ndim: int, vec: Vec) -> Tensor:
    """Turn a tensor into a matrix: flatten leading axes to rows, others to columns.

    Args:
        t: The tensor.
        row_ndim: How many leading axes index rows. Without row (or column) axes, there
            is one row (or column).
        vec: `cvec` or `rvec`.

    Returns:
        A matrix.

    Raises:
        FlatteningError: If `vec` is neither `cvec` nor `rvec`.
    """
    vec = check_vec(vec)
    check_tensor("t", t)
    if row_ndim == 0:
        t, row_ndim = t.unsqueeze(0), 1
    if row_ndim == t.ndim:
        t = t.unsqueeze(-1)
    return vec(vec(t, 0, row_ndim - 1), 1, -1)


def find_vec(vec: object) -> VecFunction | None:
    """Return the function that a value is or names; `None` if it is neither."""
    if isinstance(vec, str):
        return _FUNCTIONS.get(vec)
    return next((function for function in _FUNCTIONS.values() if vec is function), None)


def check_vec(vec: Vec) -> VecFunction:
    """Return a flattening, given as a function or by its name, as a function.

    Raise an error if it is neither `cvec` nor `rvec`.
    """
    function = find_vec(vec)
    if function is None:
        raise FlatteningError(
            f"vec is {vec!r}, expected one of the functions cvec and rvec.",
            "Import them from kfs.basics.flattening and pass vec=cvec or vec=rvec.",
        )
    return function


_FUNCTIONS: dict[str, VecFunction] = {"cvec": cvec, "rvec": rvec}


if __name__ == "__main__":
    import torch

    from kfs.verification import verify

    A = torch.tensor([[1, 2], [3, 4]])
    verify("cvec stacks the columns of a matrix", cvec(A), torch.tensor([1, 3, 2, 4]))
    verify("rvec stacks the rows of a matrix", rvec(A), torch.tensor([1, 2, 3, 4]))

    T = torch.arange(2 * 3 * 4).reshape(2, 3, 4)
    reversed_axes = T.permute(2, 1, 0)
    claim = "cvec of a tensor is rvec of it with reversed axes"
    verify(claim, cvec(T), rvec(reversed_axes))
    verify("unflatten_cvec undoes cvec", unflatten_cvec(cvec(T), T.shape), T)
    verify("unflatten_rvec undoes rvec", unflatten_rvec(rvec(T), T.shape), T)

    # Entry (i, k; j, l) of a tensor is in row (i, k) and column (j, l) of the matrix.
    a, b = torch.arange(6).reshape(2, 3), 10 * torch.arange(20).reshape(4, 5)
    outer = torch.tensordot(a, b, dims=0)
    for vec in (cvec, rvec):
        expected = torch.outer(vec(a), vec(b))
        claim = "rows and columns of a matrix are flattened alike"
        verify(claim, matricize(outer, 2, vec), expected, case=vec.__name__)

    torch.manual_seed(0)
    (n1, n2), (m1, m2) = (2, 3), (4, 5)
    A = torch.randn(n1, n2, dtype=torch.float64)
    B = torch.randn(m1, m2, dtype=torch.float64)
    v = torch.randn(n2 * m2, dtype=torch.float64)
    Kv = torch.kron(A, B) @ v
    V = unflatten_cvec(v, (m2, n2))
    verify("(A x B) v = cvec(B V A^T) with V of shape m2 x n2", Kv, cvec(B @ V @ A.T))
    V = unflatten_rvec(v, (n2, m2))
    verify("(A x B) v = rvec(A V B^T) with V of shape n2 x m2", Kv, rvec(A @ V @ B.T))
