"""Products of a GGN and of KFAC through `torch.compile`, for the rows of `benchmarks.operators`.

A whole `GGN @ V` cannot be compiled: it checks data and predictions, and iterates over batches. Only its arithmetic for
one batch is compiled, written with `torch.func`. So a row is an upper bound of the gain by a compiler.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.func import functional_call, grad, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy

from benchmarks.problems import Problem
from kfs import KFAC, EmpiricalRisk

Product = Callable[[Tensor], Tensor]


def compiled_products(problem: Problem) -> dict[str, Product]:
    """Return compiled products with columns `[D, K]`, by name. On a CPU, they run without generated code, for tests."""
    backend = "inductor" if problem.X.is_cuda else "eager"
    risk = EmpiricalRisk(problem.model, torch.nn.CrossEntropyLoss(), (problem.X, problem.y))
    K = KFAC(risk)
    ggn = torch.compile(ggn_arithmetic(problem), backend=backend, dynamic=False)

    def with_math_attention(V: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):  # the other kernels have no forward mode
            result: Tensor = ggn(V)
        return result

    products = {"GGN": with_math_attention, "KFAC": torch.compile(lambda V: K @ V, backend=backend, dynamic=False)}
    return {name: product for name, product in products.items() if _works(name, problem, product)}


def ggn_arithmetic(problem: Problem) -> Product:
    """Return the product with the GGN of cross-entropy on one batch, without checks."""
    params = {name: p.detach() for name, p in problem.model.named_parameters()}
    sizes = [p.numel() for p in params.values()]

    def predict(at: dict[str, Tensor]) -> Tensor:
        result: Tensor = functional_call(problem.model, at, (problem.X,))
        return result

    def product(v: Tensor) -> Tensor:
        tangents = {name: part.reshape(p.shape) for (name, p), part in zip(params.items(), v.split(sizes), strict=True)}
        f, Jv = jvp(predict, (params,), (tangents,))[:2]
        HJv = jvp(grad(partial(cross_entropy, target=problem.y)), (f,), (Jv,))[1]
        (result,) = vjp(predict, params)[1](HJv)
        return torch.cat([result[name].flatten() for name in params])

    def columns(V: Tensor) -> Tensor:
        with torch.no_grad():
            result: Tensor = vmap(product, in_dims=1, out_dims=1)(V)
        return result

    return columns


def _works(name: str, problem: Problem, product: Product) -> bool:
    """Whether a product can be compiled; if not, print the reason."""
    size = sum(p.numel() for p in problem.model.parameters())
    try:
        product(torch.zeros(size, 2, device=problem.X.device))
    except Exception as error:  # noqa: BLE001 (a compiler fails in many ways, and there is nothing to measure then)
        print(f"{problem.name}, {name} is not compiled: {str(error).strip().partition(chr(10))[0]:.150}")
        return False
    return True
