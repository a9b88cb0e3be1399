r"""KFAC in five steps: the scaffold that all curvature matrices, layers and losses share.

Every curvature matrix here is a sum over data of outer products of vectors that are sent back through the net. KFAC
(Martens & Grosse, 2015) replaces each layer's block of it by one Kronecker product, of an input-based and a
gradient-based factor:

$$
C(\theta^{(i)}) = R \sum_n J_n^\top \Big[ \sum_c \blacktriangle_{n,c} \blacktriangle_{n,c}^\top \Big] J_n
\approx A^{(i)} \otimes B^{(i)}
$$

The scaffold leaves two questions open. Which vectors $\blacktriangle_{n,c}$ are sent back? This depends on the
curvature matrix; see `backpropagated_vectors`. And how are factors computed from a layer's inputs and gradients? This
depends on the layer; see `expand_Linear` and `reduce_Linear`. Convolutions differ only in their inputs; see
`expand_Conv`.

Implements: the scaffold of KFAC (chapter "KFAC: An Overview", "Algorithmic Outline"). The engine goes through the same
steps for every operation, loss and size of data, and is checked against this file; its steps are in
`kfs/factors/compute.py`.
"""

from torch import Tensor
from torch.nn import Linear, Module

from kfs.basics.forward_pass import output_and_intermediates
from kfs.basics.reduction_factors import Loss, reduction_factor
from kfs.factors.settings import Sharing
from kfs.kfac import expand_Linear, reduce_Linear
from kfs.kfac.backpropagated_vectors import OfDatum, backpropagated_vectors, send_back, type2_vectors

RULES = {"expand": expand_Linear, "reduce": reduce_Linear}


def kfac(
    model: Module, loss: Loss, X: Tensor, y: Tensor, vectors: OfDatum = type2_vectors, sharing: Sharing = "expand"
) -> dict[str, tuple[Tensor, Tensor]]:
    """Compute both factors of every linear layer, by the layer's name. A bias is the last column of `(W b)`."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, Linear)}
    rule = RULES[sharing]

    # Step 1: forward pass. Keep inputs and outputs of all layers.
    f, seen = output_and_intermediates(model, X, layers)

    # Step 2: input-based factors.
    A = {}
    for name, layer in layers.items():
        x = seen[name].input
        A[name] = rule.input_factor(x.reshape(len(x), -1, x.shape[-1]), 1.0, bias=layer.bias is not None)

    # Step 3: generate vectors, send them back to all outputs; gradient-based factors.
    V = backpropagated_vectors(loss, f, y, vectors)
    B = {}
    for name in layers:
        g = send_back(V, f, seen[name].output)
        B[name] = rule.gradient_factor(g.reshape(*g.shape[:2], -1, g.shape[-1]))

    # Step 4: the loss's reduction.
    R = reduction_factor(loss, y)

    # Step 5: return the factors.
    return {name: (R * A[name], B[name]) for name in layers}


if __name__ == "__main__":
    from functools import partial

    import torch
    from torch import cat
    from torch.nn import AvgPool2d, CrossEntropyLoss, Flatten, Sequential, Tanh

    from kfs import KFAC, EmpiricalRisk
    from kfs.basics.flattening import cvec
    from kfs.basics.ggns import vec_ggn
    from kfs.kfac.backpropagated_vectors import empirical_vectors, mc_vectors
    from kfs.kfac.expand_Linear import kfac_block
    from kfs.verification import verify, verify_at_most, verify_differs

    torch.manual_seed(0)
    model, loss = Sequential(Linear(4, 3), Tanh(), Linear(3, 3)).double(), CrossEntropyLoss()
    for N in (1, 6):
        X, y = 3 * torch.randn(N, 4, dtype=torch.float64), torch.randint(3, (N,))
        type2 = kfac(model, loss, X, y)
        empirical = kfac(model, loss, X, y, empirical_vectors)
        drawn = kfac(model, loss, X, y, partial(mc_vectors, mc_samples=100))
        f = model(X)
        for name, (A, B) in type2.items():
            case = f"{N} examples, layer {name}"
            W_b = list(model.get_submodule(name).parameters())
            G = cat([cat([vec_ggn(loss(f, y), f, p, q, vec=cvec) for q in W_b], dim=1) for p in W_b])
            if N == 1:
                verify("for one example, A (x) B equals the GGN's block", kfac_block(A, B, cvec), G, case=case)
            else:
                verify_differs("for several examples, it approximates it", kfac_block(A, B, cvec), G, case=case)
            # The error of 100 draws is about 14 percent; allow three times that.
            error = ((drawn[name][1] - B).norm() / B.norm()).item()
            verify_at_most("drawn labels converge to the same gradient-based factor", error, 0.42, case)

        risk = EmpiricalRisk(model, loss, (X, y))
        for name, block in KFAC(risk, "type-2").blocks.items():
            verify("the engine computes the same A", block.A, type2[name][0], case=f"{N} examples, layer {name}")
            verify("the engine computes the same B", block.B, type2[name][1], case=f"{N} examples, layer {name}")
        for name, block in KFAC(risk, "empirical").blocks.items():
            case = f"{N} examples, layer {name}"
            verify("for the empirical Fisher, the engine computes the same B", block.B, empirical[name][1], case=case)

    averaging = Sequential(Linear(4, 3), AvgPool2d((5, 1)), Flatten(), Tanh(), Linear(3, 3)).double()
    X, y = 3 * torch.randn(6, 5, 4, dtype=torch.float64), torch.randint(3, (6,))
    reduced = kfac(averaging, loss, X, y, sharing="reduce")
    for name, block in KFAC(EmpiricalRisk(averaging, loss, (X, y)), sharing="reduce").blocks.items():
        verify(
            "if positions are summed, the engine computes the same A", block.A, reduced[name][0], case=f"layer {name}"
        )
        verify(
            "if positions are summed, the engine computes the same B", block.B, reduced[name][1], case=f"layer {name}"
        )
