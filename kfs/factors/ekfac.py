r"""EKFAC: KFAC's eigenvectors with corrected eigenvalues, the sums of squared gradients in these eigenbases.

Algebra with blocks of eigenvalues and eigenvectors lives in `kfs.factors.blocks.eigenbasis`.

KFAC approximates a block $C = R \sum_{n,c} \mathrm{vec}(G_{n,c}) \mathrm{vec}(G_{n,c})^\top$ of a curvature matrix by
$B \otimes A$ (in `rvec`), with eigenvectors $Q_B \otimes Q_A$ and eigenvalues $\lambda_B \lambda_A$. George et al.
(2018) keep the eigenvectors and replace the eigenvalues by the curvature along them,

$$
\Lambda = R \sum_{n,c} \left(Q_B^\top G_{n,c}\, Q_A\right)^{\odot 2},
\qquad
C \approx (Q_B \otimes Q_A)\, \mathrm{diag}(\mathrm{vec}\, \Lambda)\, (Q_B \otimes Q_A)^\top .
$$

With these eigenvectors, no other eigenvalues, including KFAC's, are closer to $C$ in the Frobenius norm. The trace of
the approximation is the trace of $C$.

Without weight sharing, $G_{n,c} = g\, x^\top$, and its squares are those of an outer product. So
$\Lambda = R \sum (Q_B^\top g)^{\odot 2} \left((Q_A^\top x)^{\odot 2}\right)^\top$ is a product of two matrices, and no
per-example gradient is formed. With weight sharing, the gradients of a few examples at a time are formed. Either inputs
and gradients are rotated before they are multiplied, or their product is rotated, whichever takes fewer operations.

EKFAC takes two passes over the data: one for the factors, one for the eigenvalues. In the second pass, every rank needs
the eigenvectors of a block for its own data. If blocks have owners, the owners send eigenvectors to all ranks for this
pass, and get the sums. With `factor_memory`, there are several such passes, each for as many blocks as fit into memory.

With Monte Carlo draws, the eigenvalues use other draws than the factors. By chance, the draws of the factors have the
least curvature along the smallest eigenvectors of these factors. With the same draws, the smallest eigenvalues would be
several times too small, and inverses too large. With fresh draws, every eigenvalue is unbiased. So with `mc_samples=m`,
factors use the draws `0, ..., m - 1` of every example, and eigenvalues use the draws `m, ..., 2 m - 1`. The draws
depend only on the seed, the example and their number.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from kfs.display.describe import Description, counted
from kfs.display.progress import show_progress
from kfs.distributed import Ranks, checksum
from kfs.distributed.assignment import subsets_of
from kfs.errors import DataError, ModelError
from kfs.factors.accumulate.per_example import PerDatumSums, Squares
from kfs.factors.audit import Audit
from kfs.factors.block import Block, LossScale
from kfs.factors.blocks.block_diagonal import BlockDiagonal
from kfs.factors.blocks.eigenbasis import Eigenbasis
from kfs.factors.blocks.stack import Stack, check_coverage, stacks_of
from kfs.factors.blocks.structure import Structure
from kfs.factors.checkpoint import Checkpoint, Journal, Progress, digest, naming
from kfs.factors.compute import WITHOUT_VMAP, JournalOf, exact_diagonals, memory_of_pass, one_by_one, sweep
from kfs.factors.kfac import KFAC
from kfs.factors.settings import Fisher, Settings, Sharing
from kfs.files import UnfitError
from kfs.operators.space import Space
from kfs.problem.risk import EmpiricalRisk, check_risk
from kfs.runtime.memory import copied
from kfs.runtime.sync import allow_sync, numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def compute_parts(
    K: KFAC, risk: EmpiricalRisk, checkpoint: Checkpoint | None = None
) -> tuple[KFAC, list[Stack], int, float, Audit | None]:
    """Decompose factors, and compute eigenvalues; return everything that an `EKFAC` consists of."""
    K.distribution.check(risk.ranks)
    with allow_sync(), K.distribution.agree("eigenvectors"):  # so that decompositions are checked before they are used
        bases = K._map_structures(lambda one: _without_values(one.eigenbasis())).own_stacks
    if risk.ranks.are_several and K.distribution.is_complete:
        found = [_checked(stack.structure) for stack in bases]
        tensors = [Q.values for basis in found for Q in (basis.Q_A, basis.Q_B)]
        risk.ranks.same(
            "Eigenvectors",
            list(map(checksum, tensors)),
            "Use the same kind of device and the same version of PyTorch in all processes.",
        )
    journal = None
    if checkpoint is not None:
        own = _by_name(bases, K)
        digests = [(name, digest([basis.Q_A.values, basis.Q_B.values])) for name, basis in own.items()]
        of_all = dict(K.distribution.union("eigenvectors", digests))
        journal = partial(Journal, checkpoint, risk, K.settings.with_fresh_draws(), basis=of_all)
    with naming(checkpoint):
        sums, progress = compute_eigenvalues(K, bases, risk, K.settings, journal)
    return K, sums, progress.num_data, progress.count, progress.audit


def compute_eigenvalues(
    K: KFAC, bases: list[Stack], risk: EmpiricalRisk, settings: Settings, journal: JournalOf | None = None
) -> tuple[list[Stack], Progress]:
    """Sum squared gradients in the eigenbases, without the reduction factor.

    Args:
        K: The KFAC whose eigenvectors are used.
        bases: The eigenvectors of the blocks of this process.
        risk: Model, loss, data and parameters.
        settings: Which curvature matrix, and how. Draws are fresh: those that eigenvectors come from have, by chance,
            little curvature along the smallest ones.
        journal: Creates journals, which keep intermediate results in files.

    Returns:
        The same eigenvectors with eigenvalues, and the counts.
    """
    K.loss.check_same(LossScale.of(risk))
    fresh = settings.with_fresh_draws()
    stacks = [_zeros(stack) for stack in bases]
    try:
        progress = _sum_squares(K, _by_name(stacks, K), risk, fresh, journal)
    except WITHOUT_VMAP as error:
        fresh = one_by_one(fresh, error)
        stacks = [_zeros(stack) for stack in bases]
        progress = _sum_squares(K, _by_name(stacks, K), risk, fresh, journal)
    # Write the exact diagonals of parameters that no rule covers.
    exact = [block.name for block in K.blocks.values() if block.sharing == "exact"]
    if exact:
        entries = exact_diagonals(risk, exact, settings)
        for name, basis in _by_name(stacks, K).items():
            if name in entries:
                basis.values.copy_(entries[name].reshape(1, -1, 1))
    finite = numbers([stack.structure.like.isfinite().all() for stack in stacks])
    with risk.ranks.agreed("eigenvalues"):
        for stack, is_finite in zip(stacks, finite, strict=True):
            if not is_finite:
                raise DataError(
                    f"Gradients of the blocks {sorted(set(stack.names))} are not finite.",
                    "Look for NaN or infinity in the data, the parameters or the loss.",
                )
    return stacks, progress


def _sum_squares(
    K: KFAC, blocks: Mapping[str, Eigenbasis], risk: EmpiricalRisk, settings: Settings, journal: JournalOf | None
) -> Progress:
    """Add squared gradients to eigenvalues, in place, and return the counts of the last pass."""
    # Choose subsets of blocks whose eigenvectors fit into memory. All ranks need the same ones.
    names = [name for name, block in K.blocks.items() if block.sharing != "exact"]
    sizes = dict(K.distribution.union("bases", [(name, basis.nbytes) for name, basis in blocks.items()]))
    memory = memory_of_pass(risk, settings)
    available = float("inf") if memory is None else memory
    progress = Progress()
    bases: dict[str, Eigenbasis] = {}
    for number, subset in enumerate(subsets_of({name: sizes[name] for name in names}, available), 1):
        chosen = sorted(subset, key=names.index)
        stage = "eigenvalues" if number == 1 else f"eigenvalues.{number}"
        which = None if memory is None else chosen
        # A pass over the data for each subset, with eigenvectors from all owners, or from host memory.
        bases.clear()
        bases |= _fetched(K, {name: blocks[name] for name in chosen if name in blocks})
        layouts = {block.layout.key: block.layout for block in K.blocks.values()}
        keys = {K.blocks[name].layout.key: name for name in chosen}
        others = {K.blocks[name].layout.key for name in names if name not in subset}
        owners = {key: K.owners[name] for key, name in keys.items()} if K.owners else None
        sums = PerDatumSums(settings, layouts, {k: _squares(bases[n]) for k, n in keys.items()}, others, owners)
        made = None if journal is None else journal(stage, blocks=which)
        progress = sweep(risk, sums, settings, "EKFAC", made)
        sums.check_complete(resumed=journal is not None)
        for name in chosen:
            if name in blocks and blocks[name] is not bases[name]:
                blocks[name].values.copy_(bases[name].values)
    return progress


def _fetched(K: KFAC, own: Mapping[str, Eigenbasis]) -> dict[str, Eigenbasis]:
    """Return the eigenvectors of the blocks of all ranks on the model's device, with eigenvalues to add to."""
    if K.distribution.is_complete:
        elsewhere = K.settings.factor_device is not None
        bases = copied(own.values(), K.device, Eigenbasis.mapped) if elsewhere else own.values()
        return dict(zip(own, bases, strict=True))
    found = {}
    for name, of_basis in K.distribution.each([(name, basis.state()) for name, basis in own.items()]):
        basis = Eigenbasis.from_state(of_basis, *K.blocks[name].layout.matrix_shape)
        found[name] = replace(basis.to(K.device), values=torch.zeros_like(basis.values, device=K.device))
    return found


def _squares(basis: Eigenbasis) -> Squares:
    """Return the moment that accumulates the eigenvalues of a block."""
    Q_A, Q_B = (Q.values if Q.kind == "dense" else None for Q in (basis.Q_A, basis.Q_B))
    return Squares(basis.values, Q_A, Q_B)


def _by_name(stacks: list[Stack], K: KFAC) -> dict[str, Eigenbasis]:
    """Return the blocks of stacks by name, as views, without blocks of unused rows."""
    blocks = ((layout.name, block) for stack in stacks for layout, block in stack.blocks())
    return {name: _checked(block) for name, block in blocks if name in K.blocks}


class EKFAC(BlockDiagonal):
    """KFAC with corrected eigenvalues. It takes the arguments of `KFAC`, except that there is no `"forward-only"`.

    Args:
        risk: Model, loss, data and parameters.
        fisher: As in `KFAC`. With `"mc"`, eigenvalues use other draws than eigenvectors, as many for each example; with
            the same draws, the smallest eigenvalues would be several times too small.
        sharing: As in `KFAC`.
        checkpoint: As in `KFAC`. A second file, with `.eigenvalues` appended to its name, keeps eigenvalues.
        **settings: All other settings of `KFAC`. `products` applies to factors. Eigenvalues are computed in float32 or
            better, except on a GPU for gradients in half precision: these are multiplied with eigenvectors in TF32,
            which has more digits than they have.

    Attributes:
        factors: The KFAC whose eigenvectors these are.
        blocks: Its blocks by name, with `A` and `B`.
        settings: All settings.
        num_data: Number of examples that the eigenvalues were computed from.
        audit: The report of the audit; `None` if there was none, or if eigenvalues were loaded.

    Example:
        >>> model, data = torch.nn.Linear(3, 2), (torch.rand(9, 3), torch.rand(9, 2))
        >>> print(EKFAC(EmpiricalRisk(model, torch.nn.MSELoss(), data), "mc", mc_samples=2))
        EKFAC of Linear with MSELoss (mean): 8 x 8, float32 on cpu, symmetric
          fisher='mc', sharing='expand', mc_samples=2
          factors of 9 examples, eigenvalues of 9, 1 block, 80 B of factors
        blocks
        block   matrix  A          B          operations  bytes
        ------  ------  ---------  ---------  ----------  -----
        weight  2 x 4   dense 4x4  dense 2x2  linear       80 B

    Example:
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
        >>> risk = EmpiricalRisk(model, torch.nn.CrossEntropyLoss(), (torch.rand(10, 4), torch.randint(2, (10,))))
        >>> E = EKFAC(risk)
        >>> (E.inverse(damping=1e-3) @ risk.gradient())["0.weight"].shape
        torch.Size([3, 4])
    """

    symmetric = True

    def __init__(
        self,
        risk: EmpiricalRisk,
        fisher: Fisher = "type-2",
        sharing: Sharing | Mapping[str, Sharing] = "expand",
        *,
        checkpoint: str | Path | Checkpoint | None = None,
        **settings: Any,
    ) -> None:
        check_risk(risk)
        with risk.ranks.agreed("EKFAC"), show_progress("EKFAC", 2, risk.progress, "pass") as line:
            _check_fisher(fisher)
            checkpoint = checkpoint if isinstance(checkpoint, Checkpoint | None) else Checkpoint(checkpoint)
            factors = KFAC(risk, fisher, sharing, checkpoint=checkpoint, **settings)
            line.advance()
            self._set(*compute_parts(factors, risk, checkpoint))

    @classmethod
    def from_kfac(cls, K: KFAC, risk: EmpiricalRisk) -> "EKFAC":
        """Compute eigenvalues from any data, for the eigenvectors of an existing KFAC.

        Args:
            K: The KFAC. Its factors are used without a copy.
            risk: The same model, loss and parameters, with any data.
        """
        check_risk(risk)
        if not isinstance(K, KFAC):
            raise ModelError(f"EKFAC.from_kfac got a {type(K).__name__}.", "Pass a kfs.KFAC, and a risk.")
        with K.distribution.agree("EKFAC.from_kfac", risk.ranks):
            _check_fisher(K.settings.fisher)
            factors = K.shared()
            factors._factors.risk_of = K.risk_of or risk.with_model
            return cls._from_parts(*compute_parts(factors, risk))

    def _set(self, factors: KFAC, sums: list[Stack], num_data: int, count: float, audit: Audit | None = None) -> None:
        """Set all attributes."""
        self.factors = factors
        self._of = self._of or factors.of  # a name given by `called` stays
        self._sums = sums
        self.num_data = num_data
        self.count = count
        self.audit = audit
        R = factors.loss.reduction_factor(count)
        stacks = [Stack(stack.layouts, _with_noise(stack.structure.scaled(R))) for stack in sums]
        super().__init__(factors.domain, stacks, factors.distribution)

    @property
    def blocks(self) -> dict[str, Block]:
        """The blocks of the factors, by name. Their `A` and `B` are KFAC's; the eigenvectors come from them."""
        return self.factors.blocks

    @property
    def computed_at(self) -> str:
        """Digest of the parameter values at which the factors were computed; empty if unknown."""
        return self.factors.computed_at

    @property
    def settings(self) -> Settings:
        """All settings."""
        return self.factors.settings

    def fetch(self, name: str) -> Block:
        """Return a block with `A` and `B` from any owner; see `KFAC.fetch`."""
        return self.factors.fetch(name)

    def describe(self) -> Description:
        """Describe model, loss, settings, data and blocks."""
        data = f"factors of {counted(self.factors.num_data, 'example')}, eigenvalues of {self.num_data:,}"
        return self.factors._factors.describe(self.about, data)

    def plot(self, names: Iterable[str] | None = None, *, most: int = 12) -> "list[Axes]":
        """Draw the factors `A` and `B` of every block as heat maps, into a new figure; see `KFAC.plot`."""
        return self.factors.plot(names, most=most)

    def update(self, risk: EmpiricalRisk) -> Self:
        """Add more data to the eigenvalues, in place, with the same eigenvectors. If it fails, nothing is changed.

        Args:
            risk: The same model, loss and parameters with other data. Draws continue where they ended.
        """
        settings = replace(self.settings, first_datum=self.settings.first_datum + self.num_data)
        with self.distribution.agree("update", getattr(risk, "ranks", None)):
            check_risk(risk)
            self.distribution.check(risk.ranks)
            sums, progress = compute_eigenvalues(self.factors, self._sums, risk, settings)
            self._add(sums, progress.num_data, progress.count)
        return self

    def merge(self, other: "EKFAC") -> Self:
        """Add the eigenvalues of another EKFAC with the same eigenvectors, computed from other data, in place.

        Args:
            other: An EKFAC from the same factors; create both with `from_kfac`.
        """
        with self.distribution.agree("merge"):
            if not isinstance(other, EKFAC):
                raise ModelError(f"A {type(other).__name__} cannot be merged with an EKFAC.", "Merge two of one kind.")
            self.settings.check_same(other.settings)
            self.factors.loss.check_same(other.factors.loss)
            is_same = self.distribution.shares(other.distribution) and all(
                mine.layouts == theirs.layouts and _checked(mine.structure).same_basis(theirs.structure)
                for mine, theirs in zip(self._sums, other._sums, strict=True)
            )
            if not is_same:
                raise ModelError("The eigenvectors differ.", "Make both from one KFAC, with EKFAC.from_kfac(K, risk).")
        self._add(other._sums, other.num_data, other.count)
        return self

    def _add(self, sums: list[Stack], num_data: int, count: float) -> None:
        """Add the eigenvalues of other data."""
        for mine, theirs in zip(self._sums, sums, strict=True):
            mine.structure.like.add_(theirs.structure.like.to(mine.structure.like))
        self._set(self.factors, self._sums, self.num_data + num_data, self.count + count, self.audit)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """Move factors, eigenvectors and eigenvalues to a device, or convert them, in place."""
        sums = [Stack(stack.layouts, stack.structure.to(device, dtype)) for stack in self._sums]
        self._set(self.factors.to(device, dtype), sums, self.num_data, self.count, self.audit)
        return self

    def _about(self) -> dict[str, Any]:
        return self.factors._about() | {"num_data": self.num_data}

    def _state(self) -> dict[str, Any]:
        return self.factors._state() | {
            "num_data": self.num_data,
            "num_data_of_factors": self.factors.num_data,
            "eigenvalues": [stack.state() for stack in self._sums],
            "eigen_count": self.count,
        }

    @classmethod
    def _from_state(cls, state: Any, space: Space, ranks: Ranks | None = None) -> Self:
        factors = KFAC._from_state(state | {"num_data": state["num_data_of_factors"]}, space, ranks)
        sums = list(map(Stack.from_state, state["eigenvalues"]))
        check_coverage([layout for stack in sums for layout in stack.layouts], space)
        if not all(isinstance(stack.structure, Eigenbasis) for stack in sums):
            raise UnfitError("blocks are not given by eigenvalues")
        sums = stacks_of(sums, factors.distribution)
        return cls._from_parts(factors, sums, int(state["num_data"]), float(state["eigen_count"]))


def _check_fisher(fisher: str) -> None:
    """Raise for a curvature matrix without gradients."""
    if fisher == "forward-only":
        raise ModelError(
            "fisher='forward-only' has no gradients to correct eigenvalues with.", "Use KFAC, or another fisher."
        )


def _checked(basis: Structure) -> Eigenbasis:
    assert isinstance(basis, Eigenbasis)  # noqa: S101 (all of them are made that way)
    return basis


def _with_noise(structure: Structure) -> Eigenbasis:
    """Return the basis with the noise of its eigenvalues: they are squares of rotated, and so rounded, gradients."""
    basis = _checked(structure)
    precision = sum(basis.values.shape[1:]) * torch.finfo(basis.values.dtype).eps
    return replace(basis, noise=precision**2 * basis.values.flatten(1).amax(1).to(basis.noise))


def _without_values(structure: Structure) -> Eigenbasis:
    """Return eigenvectors with zeros for eigenvalues, which need no memory."""
    basis = _checked(structure)
    return replace(basis, values=basis.values.new_zeros(()).expand_as(basis.values))


def _zeros(stack: Stack) -> Stack:
    """Return the same eigenvectors with eigenvalues of zero."""
    basis = _checked(stack.structure)
    zeros = torch.zeros_like(basis.values, memory_format=torch.contiguous_format)
    return Stack(stack.layouts, replace(basis, values=zeros, noise=torch.zeros_like(basis.noise)))


if __name__ == "__main__":
    from torch.nn import CrossEntropyLoss, Linear, Sequential, Tanh

    from kfs.operators import GGN
    from kfs.verification import verify, verify_differs, verify_that

    torch.manual_seed(0)
    model = Sequential(Linear(4, 3), Tanh(), Linear(3, 3)).double()
    for N in (1, 20):
        X, y = 3 * torch.randn(N, 4, dtype=torch.float64), torch.randint(3, (N,))
        risk = EmpiricalRisk(model, CrossEntropyLoss(), (X, y))
        K, E = KFAC(risk), EKFAC(risk)
        for name, block in K.blocks.items():
            exact, kfac, ekfac = (op.submatrix(block.layout.params).to_dense() for op in (GGN(risk), K, E))
            case = f"layer {name}, {counted(N, 'example')}"
            if N == 1:
                verify("for one example, EKFAC equals the GGN's block", ekfac, exact, case=case)
                continue
            verify_differs("for several examples, it approximates it", ekfac, exact, case=case)
            closer = (ekfac - exact).norm() < (kfac - exact).norm()
            verify_that("better than KFAC does, in the Frobenius norm", bool(closer), case=case)
            verify("the trace is right", ekfac.trace(), exact.trace(), case=case)
            Q = K.eigh()[1].submatrix(block.layout.params).to_dense()
            rotated = Q.T @ ekfac @ Q
            verify("it is diagonal in KFAC's eigenvectors", rotated, torch.diag(rotated.diagonal()), case=case)
            verify("with the exact block's diagonal", rotated.diagonal(), (Q.T @ exact @ Q).diagonal(), case=case)
