r"""Influence functions with block-diagonal curvature: scores of pairs of data, by products of gradients.

Training data $n$ with weight $1 + \epsilon$ move the parameters by $-\epsilon R H^{-1} g_n$, where $R$ is the reduction
factor of the training loss, $g_n$ the gradient of the datum's own term, and $H$ the curvature. So a quantity of a query
with gradient $g_q$ changes by $-\epsilon R\, g_q^\top H^{-1} g_n$. The score is $g_q^\top H^{-1} g_n$.
"""

from collections.abc import Iterator, Sequence
from typing import Literal, overload

import torch
from torch import Tensor
from torch.nn.functional import pad

from kfs.describing import Described, Description, counted, kind
from kfs.errors import DataError, ModelError
from kfs.influence.checks import check_choice, check_memory, check_risk, check_same_parameters, inverse_of
from kfs.influence.ranking import Best, Ranked, Top
from kfs.influence.stream import Queries, Request, Stream, check_finite
from kfs.influence.tokens import by_token, positions_of
from kfs.kfac.block_gradients import BlockGradients
from kfs.kfac.datum_gradients import GradientBatch
from kfs.kfac.structures import BlockDiagonal, Damping, Method, Relative
from kfs.losses.quantities import Quantity, gradient_of, sign_of
from kfs.risk import EmpiricalRisk

By = Literal["block", "layer", "token"]
Normalize = Literal["cosine", "self"]
_BY = ("block", "layer", "token")
_NORMALIZE = ("cosine", "self")


class Influence(Described):
    """Influence functions: which training data made a model predict what it does?

    A positive score means that the training datum helps: without it, the query's loss is predicted to be higher, by
    `train.reduction_factor * score`. (For `"log-probability"` and `"margin"` of queries, of which more is better,
    helpful data have negative scores.) Scores are `g_q^T (K + damping)^-1 g_n` with gradients of single data, as in
    other libraries: they have no `1 / N`.

    Args:
        K: The curvature of the training loss: `KFAC`, `EKFAC`, or another operator with blocks.
        damping: What is added to the curvature, as in `K.inverse`.
        method: How it is added, as in `K.inverse`.

    Attributes:
        K: The curvature.
        inverse: The damped inverse.

    Raises:
        ModelError: If the operator has no blocks, or is not symmetric.
        SolverError: If a block is singular. It is named.

    Example:
        >>> from kfs import EKFAC
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        >>> X, y = torch.rand(30, 4), torch.randint(3, (30,))
        >>> train = EmpiricalRisk(model, torch.nn.CrossEntropyLoss(), (X, y))
        >>> queries = EmpiricalRisk(model, torch.nn.CrossEntropyLoss(), (torch.rand(5, 4), torch.randint(3, (5,))))
        >>> influence = Influence(EKFAC(train))
        >>> influence.scores(queries, train).shape, influence.self_scores(train).shape
        (torch.Size([5, 30]), torch.Size([30]))
        >>> influence.top(queries, train, k=3).helpful.indices.shape
        torch.Size([5, 3])
        >>> influence
        Influence of Sequential with CrossEntropyLoss (mean): 2 blocks, float32 on cpu
          EKFAC.inverse(Relative(0.1))
    """

    def __init__(
        self,
        K: BlockDiagonal,
        damping: Damping = Relative(0.1),  # noqa: B008 (nobody changes it)
        method: Method = "exact",
    ) -> None:
        """Invert."""
        if not isinstance(K, BlockDiagonal):
            raise ModelError(
                f"Influence takes an operator with blocks, and this is a {type(K).__name__}.",
                "Use kfs.KFAC or kfs.EKFAC, or exact_blocks of kfs.kfac.alternatives for small layers. For products "
                "with an exact inverse, see kfs.operators.solve.",
            )
        if not K.symmetric:
            raise ModelError("The operator is not symmetric.", "Use the curvature itself, and not a product with it.")
        self.K = K
        self.inverse = inverse_of(K, damping, method)

    def describe(self) -> Description:
        """Describe model, blocks and inverse."""
        inverse = self.inverse.describe().title.partition(" of ")[0]
        names = [layout.name for stack in self.inverse.stacks for layout in stack.layouts]
        of = f" of {self.K.of}" if self.K.of else ""
        title = f"Influence{of}: {counted(len(names), 'block')}, {kind(self.K.dtype, self.K.device)}"
        return Description(title, (inverse,))

    @overload
    def scores(
        self,
        queries: EmpiricalRisk,
        train: EmpiricalRisk,
        *,
        of: Quantity = "loss",
        of_train: Quantity = "loss",
        by: Literal["token"] | None = None,
        normalize: Normalize | None = None,
        memory: int = 2**32,
    ) -> Tensor: ...
    @overload
    def scores(
        self,
        queries: EmpiricalRisk,
        train: EmpiricalRisk,
        *,
        of: Quantity = "loss",
        of_train: Quantity = "loss",
        by: Literal["block", "layer"],
        normalize: Normalize | None = None,
        memory: int = 2**32,
    ) -> dict[str, Tensor]: ...
    def scores(
        self,
        queries: EmpiricalRisk,
        train: EmpiricalRisk,
        *,
        of: Quantity = "loss",
        of_train: Quantity = "loss",
        by: By | None = None,
        normalize: Normalize | None = None,
        memory: int = 2**32,
    ) -> Tensor | dict[str, Tensor]:
        """Compute the score of every pair of a query and a training datum.

        Args:
            queries: Data to explain, with the same model and parameters.
            train: Data to explain them by.
            of: Which quantity of queries is explained, as in `kfs.per_datum`: `"loss"`, `"log-probability"`,
                `"margin"`, or a function of one datum's prediction and target.
            of_train: Which quantity of training data is differentiated. Models are trained by their `"loss"`.
            by: `None` for scores `[queries, train]`. `"block"` or `"layer"` for a dictionary of such scores, which sum
                up to the total. `"token"` for the share of every position of training data, `[queries, train,
                positions]`, zero behind the last position of a shorter one.
            normalize: `"cosine"` divides by the roots of both self-scores, so that scores are between -1 and 1.
                `"self"` divides by the root of the training datum's alone (Barshan et al., 2020): otherwise, unusual
                data with large gradients have large scores for most queries. Shares of blocks are divided by the same
                numbers as their sum.
            memory: How many bytes of the queries' gradients are kept. If they do not fit, there is a pass over the
                training data for every part of the queries that does.

        Returns:
            The scores, on the model's device.

        Raises:
            ModelError: If models or parameters differ from each other or from those of the operator.
            DataError: If there are no data, a gradient is not finite, or positions are not those of tokens.
        """
        check_choice("by", by, _BY)
        stream = self._stream(Request(queries, train, of, of_train, normalize, memory))
        rows: dict[str, list[Tensor]] = {}
        for chunk in stream.chunks():
            columns: dict[str, list[Tensor]] = {}
            for batch in stream.train():
                found: dict[str, Tensor] = {}
                for name, scores in self._pairs(stream, chunk, batch, by):
                    key = _key(by, batch.blocks[name])
                    found[key] = scores if key not in found else found[key].add_(scores)
                for key, scores in found.items():
                    check_finite(scores, chunk, batch)
                    columns.setdefault(key, []).append(scores)
            for key, parts in columns.items():
                rows.setdefault(key, []).append(_joined(parts, 1))
        result = {key: _joined(parts, 0) for key, parts in rows.items()}
        return result if by in {"block", "layer"} else result[""]

    def self_scores(self, train: EmpiricalRisk, *, of: Quantity = "loss") -> Tensor:
        """Compute the score of every datum with itself, `[train]`.

        It is large for data that are hard to learn, and for many that are mislabelled.

        Args:
            train: The data.
            of: Which quantity is differentiated, as in `scores`.
        """
        stream = self._stream(Request(train, train, of, of, None, 0))
        return torch.cat([stream.own(batch) for batch in stream.train()])

    def top(
        self,
        queries: EmpiricalRisk,
        train: EmpiricalRisk,
        k: int = 10,
        *,
        of: Quantity = "loss",
        of_train: Quantity = "loss",
        normalize: Normalize | None = None,
        memory: int = 2**32,
    ) -> Top:
        """Find the training data that help and harm each query most, without keeping the scores of all pairs.

        A function as `of` counts as a loss: less is better.

        Args:
            queries: As in `scores`.
            train: As in `scores`.
            k: How many of both for each query.
            of: As in `scores`.
            of_train: As in `scores`.
            normalize: As in `scores`.
            memory: As in `scores`.

        Raises:
            DataError: If there are fewer than `k` training data.
        """
        stream = self._stream(Request(queries, train, of, of_train, normalize, memory))
        num_data = train.num_data
        if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= num_data:
            raise DataError(f"k is {k!r}, and there are {num_data:,} training data.", f"Use 1 to {num_data}.")
        sign = sign_of(of) * sign_of(of_train)
        found: list[tuple[Ranked, Ranked]] = []
        for chunk in stream.chunks():
            helpful, harmful = Best(k), Best(k)
            for batch in stream.train():
                scores = torch.stack([part for _, part in stream.pairs(chunk, batch)]).sum(0)
                check_finite(scores, chunk, batch)
                helpful.add(sign * scores, batch.start)
                harmful.add(-sign * scores, batch.start)
            found.append((helpful.ranked(sign), harmful.ranked(-sign)))
        both = [Ranked(*map(torch.cat, zip(*parts, strict=True))) for parts in zip(*found, strict=True)]
        return Top(*both)

    def _pairs(
        self, stream: Stream, chunk: Queries, batch: GradientBatch, by: By | None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield scores by block, or those of every token."""
        if by != "token":
            return stream.pairs(chunk, batch)
        positions = positions_of(batch)
        return stream.pairs(chunk, batch, lambda queries, train, use: by_token(queries, train, use, positions))

    def _stream(self, request: Request) -> Stream:
        """Check what was asked for."""
        check_choice("normalize", request.normalize, _NORMALIZE)
        check_memory(request.memory)
        check_risk(self.K, request.train, "train")
        check_risk(self.K, request.queries, "queries")
        gradient_of(request.of, request.queries.loss)
        gradient_of(request.of_train, request.train.loss)
        check_same_parameters(self.K, request.queries, request.train)
        return Stream(self.K, self.inverse, request)


def _key(by: By | None, block: BlockGradients) -> str:
    """Return what the scores of a block are added to: themselves, those of its layer, or all."""
    if by == "block":
        return block.layout.name
    if by == "layer":
        return block.layout.weight.rpartition(".")[0] or block.layout.name
    return ""


def _joined(parts: Sequence[Tensor], axis: int) -> Tensor:
    """Put scores one after the other; those of fewer positions get zeros."""
    most = [max(part.shape[place] for part in parts) for place in range(2, parts[0].ndim)]
    padded = [pad(part, (0, most[0] - part.shape[2])) if most else part for part in parts]
    return torch.cat(padded, axis)
