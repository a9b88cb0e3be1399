r"""KFAC in five steps: the scaffold that all curvature matrices and layers share.

Every curvature matrix here is a sum over data of outer products of vectors that are
sent back through the net. KFAC (Martens & Grosse, 2015) replaces each layer's block of
it by one Kronecker product, of an input-based and a gradient-based factor:

$$
C(\theta^{(i)})
= R \sum_n J_n^\top
\Big[ \sum_c \blacktriangle_{n,c} \blacktriangle_{n,c}^\top \Big] J_n
\approx A^{(i)} \otimes B^{(i)}
$$

The scaffold leaves two questions open. Which vectors $\blacktriangle_{n,c}$ are sent
back? This depends on the curvature matrix; see `backpropagated_vectors`. And how are
factors computed from a layer's inputs and gradients? This depends on the layer; see
`expand_Linear` and `reduce_Linear`. Convolutions differ only in their inputs; see
`expand_Conv`.

Implements: the scaffold of KFAC (chapter "KFAC: An Overview", "Algorithmic Outline").
The engine goes through the same steps for every operation, loss and size of data, and
is checked against this file; its steps are in `kfs/factors/compute.py`.
"""

from torch import Tensor
from torch.nn import Linear, Module

from kfs.basics.forward_pass import output_and_intermediates
from kfs.basics.reduction_factors import Loss, reduction_factor
from kfs.kfac import expand_Linear, reduce_Linear
from kfs.kfac.backpropagated_vectors import (
    OfDatum,
    backpropagated_vectors,
    send_back,
    type2_vectors,
)

# Both factors of every layer, by the layer's name.
Factors = dict[str, tuple[Tensor, Tensor]]

RULES = {"expand": expand_Linear, "reduce": reduce_Linear}


def kfac(
    model: Module,
    loss: Loss,
    X: Tensor,
    y: Tensor,
    vectors: OfDatum = type2_vectors,
    sharing: str = "expand",
) -> Factors:
    """Compute factors of all linear layers. A bias is the last column of `(W b)`."""
    modules = model.named_modules()
    layers = {name: layer for name, layer in modules if isinstance(layer, Linear)}
    rule = RULES[sharing]

    # Step 1: forward pass. Keep inputs and outputs of all layers.
    f, seen = output_and_intermediates(model, X, layers)

    # Step 2: input-based factors.
    A = {}
    for name, layer in layers.items():
        x = seen[name].input
        x = x.reshape(len(x), -1, x.shape[-1])
        A[name] = rule.input_factor(x, 1.0, bias=layer.bias is not None)

    # Step 3: generate vectors, send each back to all outputs; gradient-based factors.
    V = backpropagated_vectors(loss, f, y, vectors)
    gradients = send_back(V, f, [seen[name].output for name in layers])
    B = {}
    for name, g in zip(layers, gradients, strict=True):
        B[name] = rule.gradient_factor(g.reshape(*g.shape[:2], -1, g.shape[-1]))

    # Step 4: the loss's reduction.
    R = reduction_factor(loss, y)

    # Step 5: return the factors.
    return {name: (R * A[name], B[name]) for name in layers}


if __name__ == "__main__":
    from functools import partial
    from itertools import product

    import torch
    from torch.nn import AvgPool2d, CrossEntropyLoss, Flatten, MSELoss, Sequential, Tanh

    from kfs import KFAC, EmpiricalRisk
    from kfs.basics.flattening import cvec
    from kfs.conformance.exact import exact_ggn
    from kfs.kfac.backpropagated_vectors import empirical_vectors, mc_vectors
    from kfs.kfac.expand_Linear import kfac_block
    from kfs.verification import (
        one_row_per_claim,
        verify,
        verify_at_most,
        verify_differs,
    )

    def check(loss: Loss, X: Tensor, y: Tensor) -> None:
        """Compare factors with the GGN, and with the engine's."""
        type2 = kfac(model, loss, X, y)
        drawn = kfac(model, loss, X, y, partial(mc_vectors, mc_samples=100))
        empirical = kfac(model, loss, X, y, empirical_vectors)
        case = f"{len(y)} examples, {loss}, {loss.reduction}"
        for name, (A, B) in type2.items():
            here = f"{case}, layer {name}"
            names = [f"{name}.{p}" for p, _ in model[int(name)].named_parameters()]
            G = exact_ggn(model, loss, X, y, names, cvec)
            if len(y) == 1:
                claim = "for one example, A (x) B equals the GGN's block"
                verify(claim, kfac_block(A, B, cvec), G, case=here)
            else:
                claim = "for several examples, it approximates it"
                verify_differs(claim, kfac_block(A, B, cvec), G, case=here)
            # The error of 100 draws is about 14 percent; allow three times that.
            error = ((drawn[name][1] - B).norm() / B.norm()).item()
            claim = "drawn labels converge to the same gradient-based factor"
            verify_at_most(claim, error, 0.42, here)

        risk = EmpiricalRisk(model, loss, (X, y))
        compare("the engine computes the same", KFAC(risk), type2, case)
        claim = "for the empirical Fisher, the engine computes the same"
        compare(claim, KFAC(risk, "empirical"), empirical, case)

    def compare(claim: str, engine: KFAC, factors: Factors, case: str) -> None:
        """Compare factors with those of the engine's blocks, layer by layer."""
        blocks = engine.blocks.values()
        for (name, (A, B)), block in zip(factors.items(), blocks, strict=True):
            verify(f"{claim} A", block.A, A, case=f"{case}, layer {name}")
            verify(f"{claim} B", block.B, B, case=f"{case}, layer {name}")

    torch.manual_seed(0)
    # Three outputs and both reductions: R = 2 / (3 N), 1 / N, 2 or 1.
    first, last = Linear(4, 5, bias=False), Linear(5, 3)
    model = Sequential(first, Tanh(), last, Tanh()).double()
    pooled = Sequential(Linear(4, 5), AvgPool2d((5, 1)), Flatten(), last).double()
    X = 3 * torch.randn(6, 4, dtype=torch.float64)
    sequences = 3 * torch.randn(6, 5, 4, dtype=torch.float64)
    values, labels = torch.randn(6, 3, dtype=torch.float64), torch.randint(3, (6,))
    with one_row_per_claim():
        for Kind, reduction in product((MSELoss, CrossEntropyLoss), ("mean", "sum")):
            loss, y = Kind(reduction=reduction), values if Kind is MSELoss else labels
            check(loss, X[:1], y[:1])
            check(loss, X, y)
            reduced = kfac(pooled, loss, sequences, y, sharing="reduce")
            risk = EmpiricalRisk(pooled, loss, (sequences, y))
            claim = "if positions are summed, the engine computes the same"
            compare(
                claim, KFAC(risk, sharing="reduce"), reduced, f"{loss}, {reduction}"
            )
