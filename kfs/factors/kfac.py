"""KFAC: the Kronecker-factored approximation of a curvature matrix, one block per parameter (with its bias).

It is the method of Martens & Grosse (2015), for any operation with parameters, and all curvature matrices of the paper.
The computation of factors lives in `kfs.factors.compute`, factors without algebra in `kfs.factors.block`, algebra with
blocks in `kfs.factors.blocks`. `KFAC(risk)` is `KFAC.from_factors(compute_factors(risk, settings))`.
"""

from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack

import torch

from kfs.display.describe import Description, counted
from kfs.display.suggestions import suggest
from kfs.distributed import Ranks, Same, check_same
from kfs.errors import ModelError
from kfs.factors.accumulate.block_sums import BlockSums
from kfs.factors.block import Block, Factors, LossScale
from kfs.factors.blocks.block_diagonal import BlockDiagonal
from kfs.factors.blocks.kronecker import Kronecker
from kfs.factors.blocks.stack import Stack, stacked, zero_blocks
from kfs.factors.blocks.structure import Structure
from kfs.factors.checkpoint import Checkpoint
from kfs.factors.compute import compute_factors, warn_of_wide
from kfs.factors.layout import Layout
from kfs.factors.settings import Advanced, Fisher, Settings, Sharing, Uncovered, check_names
from kfs.operators.space import Space
from kfs.problem.risk import EmpiricalRisk, check_risk

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SAME_SETTINGS = "Pass the same arguments in all processes."


class KFAC(BlockDiagonal):
    """Kronecker factors of every parametric operation of a model.

    Args:
        risk: Model, loss, data and parameters.
        fisher: The curvature matrix to approximate: `"type-2"` (the exact Fisher), `"ggn"` (the generalized
            Gauss-Newton matrix, which is the same for most losses), `"mc"`, also called `"type-1"` (the Fisher, with
            labels drawn from the model's likelihood), `"empirical"` (with the given labels), or `"forward-only"`
            (gradients are replaced by the identity at every position; with `"reduce"`, the sums over positions are
            replaced, so `B` is the identity times the average of `1 / S^2` over examples with `S` positions, as if
            positions were averaged).
        sharing: How to treat positions that share a weight (pixels, tokens): `"expand"` treats them like further
            examples, `"reduce"` sums over them first. One value for all parameters, or a dictionary by the name of a
            parameter or module; parameters that are not in it expand.
        mc_samples: Number of labels to draw per example for `"mc"`.
        seed: Seed for drawing labels. Draws depend only on the seed, the example and the sample.
        max_dim: Factors wider than this keep only their diagonal. A warning lists them.
        uncovered: What to do about parameters that no rule covers: `"error"`, `"skip"` (leave them out of this
            operator), or `"diagonal"` (compute the exact diagonal of their curvature, slowly).
        checkpoint: File for intermediate results, or a `Checkpoint` that also sets how often to write. If the file
            exists, the computation resumes from it.
        **advanced: The settings below.

    Advanced:
        joint_bias: Whether a bias shares the block of its weight.
        batch_axis: Position of the batch axis in inputs, if it is not the first. In activations, it is measured by the
            audit; without audit, it is assumed to be the same.
        first_datum: Index of the first example, for draws, if these data are part of a larger set.
        columns_at_once: Number of columns that are sent back together. More columns take more memory.
        factor_device: Device of the factors, if not the model's: `"cpu"` for factors that do not fit on a GPU. During
            a pass over the data, sums are on the GPU: at most half of its free memory, or `factor_memory`. Afterwards,
            blocks are copied to the GPU one after the other, for decompositions and products.
        factor_dtype: Dtype of the factors. By default, the model's, or float32 for half precision. Sums are always
            accumulated in float32 or better.
        products: Precision in which outer products for dense factors are computed, for models in float32 or half
            precision. `"auto"` multiplies half precision directly, with results in float32, and float32 according to
            `torch.backends.cuda.matmul`. `"float32"` converts half precision first, and does not use TF32. `"tf32"`
            multiplies float32 in TF32. `"bf16"` rounds float32 to bfloat16 first, which is fastest: an entry of a
            factor is off by at most about `2^-7` of its sum of absolute products. A CPU has no TF32, and is not faster
            with `"bf16"`. Eigenvalues of `EKFAC` are computed as with `"auto"`.
        audit: Whether to check, on a few examples of the first batch (and of the first batch of every other shape),
            that capture reproduces what the model computes; see `kfs.factors.audit.audit`. Without an audit, the batch
            axis is guessed from lengths of axes.
        replay: Whether passes over batches of one shape are recorded as a CUDA graph, from the third one on, if the
            model is on a GPU and more than a few batches follow; see `kfs.runtime.cuda_graphs`. Passes that cannot be
            recorded, because they depend on values of data, run normally; the logger `kfs.factors` reports this.
        memory: Maximum bytes of these graphs. By default, all that is available.
        placement: Where factors are stored, if several processes share the risk. With `"replicated"`, every process has
            all blocks. With `"owner"`, each block is owned by one process, which inverts and decomposes it. Then all
            processes call the same methods, as for the risk, and get the same results.
        factor_memory: Maximum bytes of the sums of one pass over the data. If blocks have more, there are several
            passes, each for some of the blocks. Results are the same to the last bit.

    Attributes:
        blocks: Blocks by name. Each has `A` and `B`; if another process owns it, use `fetch`.
        num_data: Number of examples seen.
        settings: All of the above.
        loss: Name, reduction and scale of the loss, and a digest of its settings.
        count: The divisor of a mean over all targets seen.
        audit: The report of the audit; `None` if there was none, or if factors were loaded.
        computed_at: Digest of the parameter values at which it was computed; empty if unknown.

    Raises:
        ModelError: If a parameter is not covered.
        DataError: If a factor is not finite, or the batch axis is not found where it matters.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
        >>> risk = EmpiricalRisk(model, torch.nn.CrossEntropyLoss(), (torch.rand(10, 4), torch.randint(2, (10,))))
        >>> K = KFAC(risk)
        >>> list(K.blocks), K.blocks["0"].A.shape, K.blocks["0"].B.shape
        (['0', '2'], torch.Size([5, 5]), torch.Size([3, 3]))
        >>> K
        KFAC of Sequential with CrossEntropyLoss (mean): 23 x 23, float32 on cpu, symmetric
          fisher='type-2', sharing='expand'
          10 examples, 2 blocks, 216 B of factors
        >>> (K @ risk.gradient())["2.bias"].shape
        torch.Size([2])
    """

    symmetric = True

    def __init__(
        self,
        risk: EmpiricalRisk,
        fisher: Fisher = "type-2",
        sharing: Sharing | Mapping[str, Sharing] = "expand",
        *,
        mc_samples: int = 1,
        seed: int = 0,
        max_dim: int | None = None,
        uncovered: Uncovered = "error",
        checkpoint: str | Path | Checkpoint | None = None,
        **advanced: Unpack[Advanced],
    ) -> None:
        check_risk(risk)
        with risk.ranks.agreed("KFAC"):
            # Validate all settings before any computation.
            check_names(advanced, ("fisher", "sharing", "mc_samples", "seed", "max_dim", "uncovered", "checkpoint"))
            settings = Settings(fisher, sharing, mc_samples, seed, max_dim=max_dim, uncovered=uncovered, **advanced)
            # Settings determine the number of passes, each of which compares the model over ranks, so compare them
            # first.
            if risk.ranks.are_several:
                check_same(risk.ranks, "settings", {"Settings": Same(settings.all(), _SAME_SETTINGS)})
            if isinstance(sharing, Mapping):
                _check_names(risk, sharing)
            checkpoint = checkpoint if isinstance(checkpoint, Checkpoint | None) else Checkpoint(checkpoint)
            self._set(compute_factors(risk, settings, checkpoint))
            warn_of_wide(self._factors.sums, settings, stacklevel=3)

    @classmethod
    def from_factors(cls, factors: Factors) -> Self:
        """Return the KFAC of factors that are computed already; they are used without a copy.

        Args:
            factors: As returned by `kfs.factors.compute.compute_factors`.

        Example:
            >>> from kfs.factors.compute import compute_factors
            >>> risk = EmpiricalRisk(torch.nn.Linear(3, 2), torch.nn.MSELoss(), (torch.rand(9, 3), torch.rand(9, 2)))
            >>> K = KFAC.from_factors(compute_factors(risk, Settings()))
            >>> bool((K.to_dense() == KFAC(risk).to_dense()).all())
            True
        """
        return cls._from_parts(factors)

    def _set(self, factors: Factors) -> None:
        """Set all attributes."""
        self._factors = factors
        self._of = self._of or factors.of  # a name given by `called` stays
        self.blocks: dict[str, Block] = factors.blocks
        self.settings = factors.settings
        self.loss = factors.loss
        self.count = factors.count
        self.num_data = factors.num_data
        self.audit = factors.audit
        self.computed_at = factors.computed_at
        super().__init__(factors.space, None, factors.distribution)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of copies and pickles, without the data."""
        return self.__dict__ | {"_factors": copy(self._factors)}

    @property
    def own_stacks(self) -> list[Stack]:
        """The blocks of this process as Kronecker products, stacked by size."""
        if self._stacks is None:
            self._stacks = self._stacked()
        return self._stacks

    def _stacked(self) -> list[Stack]:
        parts: list[tuple[Layout, Structure]] = [
            (block.layout, block.structure()) for block in self.blocks.values() if block.sums.is_local
        ]
        zeros = zero_blocks([block.layout for block in self.blocks.values()], self.domain)  # of unused rows
        parts += [block for block in zeros if self.distribution.has(block[0].name)]
        if self.settings.factor_device is not None:  # blocks are copied to the operator's device one after the other
            return [Stack((layout,), structure) for layout, structure in parts]
        stacks = stacked(parts)
        # Make sums views of the stacked blocks, so that they are stored once.
        for layout, structure in (block for stack in stacks for block in stack.blocks()):
            roles = self.blocks[layout.name].sums.roles if layout.name in self.blocks else {}
            if len(roles) == 1 and isinstance(structure, Kronecker):
                for s, factor in ((roles["A"].input, structure.A), (roles["A"].gradient, structure.B)):
                    if factor.kind != "identity" and factor.values.dtype == s.total.dtype:
                        s.total = factor.values
        return stacks

    @property
    def owners(self) -> Mapping[str, int]:
        """The rank that owns each block, by name; empty if all processes have all blocks."""
        return self.distribution.owners

    @property
    def risk_of(self) -> "partial[EmpiricalRisk] | None":
        """Function from a model to its risk; `None` in copies and after loading, which have no data."""
        return self._factors.risk_of

    def describe(self) -> Description:
        """Describe model, loss, settings, data and blocks."""
        return self._factors.describe(self.about, counted(self.num_data, "example"))

    def plot(self, names: Iterable[str] | None = None, *, most: int = 12) -> "list[Axes]":
        """Draw the factors `A` and `B` of every block as heat maps, into a new figure.

        Args:
            names: Blocks to draw. By default, all of them; if there are more than `most`, the first ones that are not
                just a vector, as biases and scales are.
            most: Maximum number of blocks to draw if `names` is not given.

        Returns:
            Axes of matplotlib: those of `A` and `B`, block by block.
        """
        return self._factors.plot(names, most)

    def update(self, risk: EmpiricalRisk) -> Self:
        """Add more data, in place; if it fails, nothing is changed.

        Args:
            risk: The same model, loss and parameters with other data. Draws continue where they ended.

        Returns:
            This object. It equals a KFAC computed from all data at once.
        """
        with self.distribution.agree("update", getattr(risk, "ranks", None)):
            check_risk(risk)
            self.loss.check_same(LossScale.of(risk))
            self.distribution.check(risk.ranks)
            # Draws continue after those of the data seen so far.
            settings = replace(self.settings, first_datum=self.settings.first_datum + self.num_data)
            self._set(self._factors.plus(compute_factors(risk, settings, known=self._factors)))
        return self

    def merge(self, other: "KFAC") -> Self:
        """Add the factors of another KFAC, computed from other data, in place.

        Args:
            other: A KFAC of the same model, loss and settings. With `"mc"`, give it another `first_datum`, or draws
                repeat.

        Returns:
            This object.
        """
        with self.distribution.agree("merge"):
            if not isinstance(other, KFAC):
                raise ModelError(f"A {type(other).__name__} cannot be merged with a KFAC.", "Merge two of one kind.")
            self.settings.check_same(other.settings)
            self.loss.check_same(other.loss)
            if not self.distribution.shares(other.distribution) or self.owners != other.owners:
                raise ModelError(
                    "The blocks have different owners.", "Merge two with the same owners, or K.gathered() of both."
                )
            self._set(self._factors.plus(other._factors))
        return self

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """Move all factors to a device, or convert them, in place."""
        self._set(self._factors.to(device, dtype))
        return self

    def shared(self) -> "KFAC":
        """Return a shallow copy that shares tensors; a tensor that one of them replaces stays in the other."""
        sums = [block.shared() for block in self._factors.sums]
        return KFAC.from_factors(replace(self._factors, sums=sums, of=self.of))

    def fetch(self, name: str) -> Block:
        """Return a block with its factors from any owner. If blocks have owners, all processes must call it.

        Args:
            name: The block's name.

        Example:
            >>> risk = EmpiricalRisk(torch.nn.Linear(3, 2), torch.nn.MSELoss(), (torch.rand(9, 3), torch.rand(9, 2)))
            >>> KFAC(risk, placement="owner").fetch("weight").A.shape
            torch.Size([4, 4])
        """
        self.distribution.same(self.formula, name=name)
        block = self.blocks[name]
        if self.distribution.is_complete:
            return block
        state = {"blocks": [block.sums.state()] if block.sums.is_local else []}
        (found,) = self.distribution.fetch(state)["blocks"]
        return replace(block, sums=BlockSums.from_state(found))

    def _about(self) -> dict[str, Any]:
        return super()._about() | self._factors.about()

    def _state(self) -> dict[str, Any]:
        return self._factors.state() | {"of": self.of}

    @classmethod
    def _from_state(cls, state: Any, space: Space, ranks: Ranks | None = None) -> Self:
        return cls.from_factors(Factors.from_state(state, space, ranks or Ranks()))


def _check_names(risk: EmpiricalRisk, sharing: Mapping[str, Sharing]) -> None:
    """Raise if `sharing` names parameters that do not exist."""
    known = set(risk.params) | {name.rpartition(".")[0] for name in risk.params}
    unknown = [name for name in sharing if name not in known]
    if unknown:
        raise ModelError(f"sharing has unknown names {unknown}.", suggest(unknown, sorted(known)))
