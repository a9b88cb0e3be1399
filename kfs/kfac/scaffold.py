r"""KFAC in five steps: the scaffold that all curvature matrices, operations and losses share.

Every curvature matrix here is a sum over data of outer products of what is sent back through the net, and KFAC
replaces each layer's block of it by one Kronecker product, of an input-based and a gradient-based factor:

$$
C(\theta^{(i)}) = R \sum_n J_n^\top \Big[ \sum_c \blacktriangle_{n,c} \blacktriangle_{n,c}^\top \Big] J_n
\approx A^{(i)} \otimes B^{(i)}
$$

What is specific lives elsewhere: `backpropagated_vectors` for the curvature matrix, `operations` for each kind of
operation, `expand_Linear` for the rule in its simplest form.
"""

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge
from torch.func import vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from kfs.data import Batch, mapped
from kfs.exact_derivatives import explained
from kfs.kfac.backpropagated_vectors import backpropagated_vectors
from kfs.kfac.blocks import Block
from kfs.kfac.capture.mode import Capture, Tap
from kfs.kfac.capture.uses import Uses
from kfs.kfac.rules import RULES
from kfs.kfac.rules.fallback import otherwise
from kfs.kfac.settings import Settings
from kfs.kfac.storage.checkpoint import Journal, Progress
from kfs.risk import EmpiricalRisk


@dataclass
class Result:
    """What a pass over the data gives.

    Attributes:
        blocks: Raw sums of all blocks.
        num_data: Number of data.
        count: What a mean over the targets divides by.
        uncovered: Parameters without usable block, and why.
    """

    blocks: list[Block]
    num_data: int
    count: float
    uncovered: dict[str, str]


def kfac(risk: EmpiricalRisk, settings: Settings, journal: Journal | None = None) -> Result:
    """Compute the Kronecker factors of all parametric operations.

    Args:
        risk: Model, loss, data and parameters.
        settings: Which curvature matrix, and how.
        journal: Keeps intermediate results in a file.

    Returns:
        The blocks, with raw sums: scaling by `R` is left to them, so that more data can be added.
    """
    uses = Uses(settings)
    progress = sweep(risk, uses, "KFAC", journal)
    # Step 5: return the factors.
    for block in uses.blocks.values():
        for pair in block.pairs.values():
            pair.input.finish(settings.factor_dtype)
            pair.gradient.finish(settings.factor_dtype)
    uncovered = not_covered(risk.params, uses.blocks.values(), progress.unexplained, uses.conflicts)
    return Result(list(uses.blocks.values()), progress.num_data, progress.count, uncovered)


def sweep(risk: EmpiricalRisk, uses: Uses, task: str, journal: Journal | None = None) -> Progress:
    """Show all inputs and gradients of all parametric operations to `uses`.

    Args:
        risk: Model, loss, data and parameters.
        uses: Takes note of uses; has the settings.
        task: What to call it in a progress bar.
        journal: Keeps intermediate results in a file, and may have some already.

    Returns:
        What was counted on the way.
    """
    settings, progress = uses.settings, Progress() if journal is None else journal.resume(uses)
    at_once = columns_at_once(risk, settings)
    # vmap does not know the faster attention kernels.
    attention = nullcontext() if at_once == 1 else sdpa_kernel(SDPBackend.MATH)
    with risk.untouched(first_order=True), attention, torch.enable_grad(), explained():
        for place, batch in enumerate(risk.batches(task)):
            if journal is not None and journal.knows(place, batch):
                continue
            # Step 1: forward pass. Step 2: input-based factors, on the way.
            f, capture = forward(risk, batch, uses)
            with capture.attentive():
                risk.finite(f.detach(), batch)
                uses.finish_forward()
                # Step 3: generate vectors, send them back, and add gradients to the gradient-based factors, on the way.
                first = settings.first_datum + batch.first
                vectors = backpropagated_vectors(risk.loss, f.detach(), batch.y, settings, first, at_once)
                for columns, last in and_whether_last(vectors):
                    backward(f, capture, columns.to(f.dtype), keep_graph=not last)
                    uses.finish_backward()
            uses.finish_batch()
            progress.unexplained |= capture.unexplained
            del f, capture  # their graph is large, and the next one comes before they are replaced
            # Step 4: what the loss's reduction divides by.
            progress.add(len(batch.y), risk.loss.count(batch.y))
            if journal is not None:
                journal.note(progress, uses)
    if journal is not None:
        journal.close(progress, uses)
    return progress


def columns_at_once(risk: EmpiricalRisk, settings: Settings) -> int:
    """Return how many vectors to send back together: what was asked for, or what keeps a GPU busy."""
    if settings.fisher in {"empirical", "forward-only"} or (settings.fisher == "mc" and settings.mc_samples == 1):
        return 1
    return settings.columns_at_once or (8 if risk.device.type == "cuda" else 1)


def forward(risk: EmpiricalRisk, batch: Batch, uses: Uses) -> tuple[Tensor, Capture]:
    """Evaluate the model with taps at the outputs of all parametric operations."""
    capture = Capture(risk.params, len(batch.y), uses, RULES, otherwise, uses.settings.batch_axis)
    marked = Batch(mapped(batch.x, capture.mark_data), batch.y, batch.first)
    try:
        with torch.compiler.set_stance("force_eager"), capture:  # a compiled model hides its operations
            f = risk.predict(risk.params, marked)
    except BaseException:
        capture.finished = True
        raise
    finally:
        capture.forget_marks()
    capture.running = False
    capture.unexplained |= hidden_uses(f, risk.params)
    return f, capture


def hidden_uses(f: Tensor, params: dict[str, Tensor]) -> set[tuple[str, str]]:
    """Find parameters that enter a custom `autograd.Function`, which PyTorch does not show to modes."""
    names = {id(p): name for name, p in params.items()}
    found: set[tuple[str, str]] = set()
    seen, waiting = set(), [f.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for following, _ in node.next_functions:
            name = names.get(id(getattr(following, "variable", None)))
            if name is not None and isinstance(node, BackwardCFunction) and not isinstance(node, Tap._backward_cls):
                found.add((name, type(node).__name__.removesuffix("Backward")))
            waiting.append(following)
    return found


def backward(f: Tensor | GradientEdge, capture: Capture, vectors: Tensor, keep_graph: bool = False) -> None:
    """Send vectors `[columns, *f.shape]` back to all taps, which take note of what arrives."""
    handle = capture.handle
    if handle is None or (isinstance(f, Tensor) and not f.requires_grad):  # no parameter was used
        return
    capture.keep_graph, capture.together = keep_graph, len(vectors) > 1

    def send(v: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(f, handle, v, retain_graph=keep_graph, materialize_grads=True)

    vmap(send)(vectors) if capture.together else send(vectors[0])
    capture.pass_virtual()


def and_whether_last(vectors: Iterator[Tensor]) -> Iterator[tuple[Tensor, bool]]:
    """Say of every chunk of vectors whether it is the last one."""
    chunk = next(vectors, None)
    while chunk is not None:
        following = next(vectors, None)
        yield chunk, following is None
        chunk = following


def not_covered(
    params: Iterable[str],
    blocks: Iterable[Block],
    unexplained: set[tuple[str, str]],
    conflicts: set[tuple[str, str]],
) -> dict[str, str]:
    """Return the parameters that have no block or one that lacks something, and why."""
    reasons: dict[str, str] = {}
    covered = {name for block in blocks for name in block.layout.params}
    for name, operation in sorted(unexplained):
        reasons.setdefault(name, f"it is used by {operation}, for which there is no rule")
    for name, operation in sorted(conflicts):
        reasons.setdefault(name, f"its use by {operation!r} does not fit together with its other uses")
    for name in params:
        if name not in covered:
            reasons.setdefault(name, "no operation with a rule used it, as far as predictions depend on it")
    return reasons


if __name__ == "__main__":
    from torch.nn import CrossEntropyLoss, Linear, Sequential, Tanh

    from kfs.operators import GGN
    from kfs.verification import verify, verify_differs, verify_that

    torch.manual_seed(0)
    model = Sequential(Linear(4, 3), Tanh(), Linear(3, 3)).double()
    for N in (1, 6):
        X, y = 3 * torch.randn(N, 4, dtype=torch.float64), torch.randint(3, (N,))
        risk = EmpiricalRisk(model, CrossEntropyLoss(), (X, y))
        result = kfac(risk, Settings(fisher="type-2"))
        verify_that("every parameter is covered", not result.uncovered, case=f"{N} data")
        for block in result.blocks:
            block.reduction_factor = risk.reduction_factor
            layer = GGN(risk).submatrix(block.layout.params).to_dense()
            # The joint matrix (W b), flattened by rows, has its bias entries in between.
            rows, columns = block.B.shape[0], block.A.shape[0]
            order = torch.arange(rows * columns).reshape(rows, columns)
            order = torch.cat([order[:, :-1].flatten(), order[:, -1]])
            kronecker = torch.kron(block.B, block.A)[order][:, order]
            if N == 1:
                verify("for one datum, B (x) A equals the GGN's block", kronecker, layer, case=f"layer {block.name}")
            else:
                verify_differs("for several data, it approximates it", kronecker, layer, case=f"layer {block.name}")
