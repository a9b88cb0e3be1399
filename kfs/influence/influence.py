r"""Influence functions with block-diagonal curvature: scores of pairs of examples from products of their gradients.

If the training example $n$ gets the weight $1 + \epsilon$, the parameters move by $-\epsilon R H^{-1} g_n$. Here $R$ is
the reduction factor of the training loss, $g_n$ is the gradient of the example's own loss term, and $H$ is the
curvature. Hence a quantity of a query with gradient $g_q$ changes by $-\epsilon R\, g_q^\top H^{-1} g_n$. The score is
$g_q^\top H^{-1} g_n$.
"""

import warnings
from contextlib import AbstractContextManager, nullcontext
from math import inf
from pathlib import Path
from typing import Literal, overload

import torch
from torch import Tensor

from kfs.display.describe import Described, Description, counted, kind
from kfs.errors import KfsWarning, ModelError, SolverError
from kfs.factors.blocks import BlockDiagonal, Damping, Method, Relative
from kfs.factors.match import check_curvature
from kfs.influence.cost import Cost, QueryError, cost_of, query_error
from kfs.influence.index import Index, IndexSettings
from kfs.influence.scoring import (
    By,
    Normalize,
    Request,
    Stream,
    Top,
    all_scores,
    best,
    check_alone,
    check_count,
    self_scores,
)
from kfs.influence.stored import Compression, Storage
from kfs.losses.quantities import Quantity
from kfs.problem.risk import EmpiricalRisk


class Influence(Described):
    """Influence functions: scores for how much each training example contributes to the model's predictions.

    A positive score means that the training example is helpful: without it, the query's loss is predicted to be higher,
    by `train.reduction_factor * score`. (For the quantities `"log-probability"` and `"margin"` of queries, higher is
    better, and helpful examples have negative scores.) Scores are `g_q^T (K + damping)^-1 g_n` with per-example
    gradients. As in other libraries, they do not include the factor `1 / N`.

    Args:
        K: The curvature of the training loss: `KFAC`, `EKFAC`, or another operator with blocks.
        damping: Damping of the curvature, as in `K.inverse`. The default is `Relative(0.1)` without weight decay.
        method: How the damping is added, as in `K.inverse`.
        weight_decay: L2 penalty of the training, which replaces `damping`. Pass the optimizer's weight decay, which
            adds `weight_decay / 2` times the squared norm of the parameters to the loss. The curvature of this penalty
            is `weight_decay` times the identity, so that the damped matrix is the curvature of the full training
            objective.

    Attributes:
        K: The curvature.
        inverse: The damped inverse.

    Raises:
        ModelError: If the operator has no blocks or is not symmetric, or both damping and weight decay are given.
        SolverError: If a block is singular. The message names the block.

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
        damping: Damping | None = None,
        method: Method = "exact",
        *,
        weight_decay: float | None = None,
    ) -> None:
        check_curvature(K, "Influence", way_out="For products with an exact inverse, see kfs.operators.solve.")
        self.K = K
        self._damping = _chosen_damping(damping, weight_decay)
        self._method = method
        self.inverse = _inverse_of(K, self._damping, method)

    def describe(self) -> Description:
        """Describe model, blocks and inverse."""
        inverse = self.inverse.describe().title.partition(" of ")[0]
        of = f" of {self.K.of}" if self.K.of else ""
        title = f"Influence{of}: {counted(len(self.inverse.layouts), 'block')}, {kind(self.K.dtype, self.K.device)}"
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
        query_rank: int | None = None,
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
        query_rank: int | None = None,
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
        query_rank: int | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """Compute the score of every pair of a query and a training example.

        Args:
            queries: The examples to explain, with the same model and parameters.
            train: The training data. If they are split over processes, all processes must pass the same queries, and
                each of them returns all scores.
            of: Quantity of queries to explain, as in `kfs.per_datum`: `"loss"`, `"log-probability"`, `"margin"`, or a
                function of one example's prediction and target.
            of_train: Quantity of training data to differentiate. Models are trained with the `"loss"`.
            by: `None` for scores `[queries, train]`. `"block"` or `"layer"` for a dictionary of such scores, which sum
                to the total. `"token"` for the share of every position of the training data, `[queries, train,
                positions]`, with zeros after the last position of shorter examples.
            normalize: `"cosine"` divides by the square roots of both self-scores, so that scores are between -1 and 1.
                `"self"` divides by the square root of the training example's self-score only (Barshan et al., 2020).
                Without normalization, unusual examples with large gradients have large scores for most queries. Scores
                of blocks are divided by the same numbers as their sum.
            memory: Number of bytes for the gradients of queries. If they do not fit, the queries are split into parts
                that fit, with one pass over the training data for each part.
            query_rank: Number of singular vectors to keep of each query's gradient times the inverse, for blocks where
                this takes fewer operations (Grosse et al., 2023). `query_error` measures the resulting error.

        Returns:
            The scores, on the model's device.

        Raises:
            ModelError: If models or parameters differ between queries, training data and the operator.
            DataError: If there are no data, a score is not finite, or rows do not belong to single tokens.
        """
        with _agreed(train, "scores"):
            return all_scores(self._stream(Request(queries, train, of, of_train, by, normalize, memory, query_rank)))

    def self_scores(self, train: EmpiricalRisk, *, of: Quantity = "loss") -> Tensor:
        """Compute the score of every example with itself, `[train]`.

        Self-scores are large for examples that are hard to learn, and for many mislabeled examples.

        Args:
            train: The data.
            of: Quantity to differentiate, as in `scores`.
        """
        with _agreed(train, "self-scores"):
            return self_scores(self._stream(Request(train, train, of, of)))

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
        query_rank: int | None = None,
    ) -> Top:
        """Find the most helpful and the most harmful training data of each query.

        It takes the arguments of `scores`, and `k`, the number of helpful and of harmful examples per query. The scores
        of all pairs are not stored. If `of` is a function, lower values count as better, as for a loss.

        Raises:
            DataError: If there are fewer than `k` training data.
        """
        request = Request(queries, train, of, of_train, normalize=normalize, memory=memory, query_rank=query_rank, k=k)
        with _agreed(train, "top"):
            return best(self._stream(request))

    def query_error(
        self,
        queries: EmpiricalRisk,
        train: EmpiricalRisk,
        query_rank: int,
        *,
        of: Quantity = "loss",
        of_train: Quantity = "loss",
    ) -> QueryError:
        """Return the error due to `query_rank=`: a bound from the truncated singular values, and a measured error.

        It takes the arguments of `scores`. The error is measured on scores with the first batch of training data.

        Raises:
            ModelError: If `query_rank` is `None`, or models or parameters differ.
        """
        check_alone(train, "The error")
        # Without a rank nothing is compressed, so a rank is required.
        check_count("query_rank", query_rank, optional=False)
        return query_error(self._stream(Request(queries, train, of, of_train, query_rank=query_rank)), query_rank)

    def cost(
        self,
        queries: EmpiricalRisk,
        train: EmpiricalRisk,
        *,
        of: Quantity = "loss",
        of_train: Quantity = "loss",
        memory: int = 2**32,
        query_rank: int | None = None,
        rank: int | None = None,
        compression: Compression = "low rank",
        dtype: torch.dtype = torch.float32,
    ) -> Cost:
        """Estimate the cost of scores and of an index before computing them: operations, bytes and passes.

        The model runs on one batch of queries and one batch of training data, to determine the number of rows of each
        layer. The counts of products are also used to choose how gradients are multiplied. The counts of forward and
        backward passes include only products with weights that the curvature covers. They include a backward product
        of the first layer, although it is not computed. They do not include attention between positions, for example.
        `rank`, `compression` and `dtype` are arguments of `index`, all others of `scores`.

        Example:
            >>> from kfs import KFAC
            >>> model = torch.nn.Linear(4, 3)
            >>> data = torch.rand(20, 4), torch.randint(3, (20,))
            >>> train = EmpiricalRisk(model, torch.nn.CrossEntropyLoss(), data)
            >>> Influence(KFAC(train), method="factored").cost(train, train)
            Scores of 20 queries and 20 training examples: 10.2 k operations
              1 pass over the training data; an index takes 560 B
            phases
            phase                          operations  memory
            -----------------------------  ----------  ------
            gradients of queries                1.2 k   560 B
            queries times the inverse          1.36 k   560 B
            gradients of training data          1.2 k   560 B
            training data into their form           0     0 B
            products                            6.4 k   2 KiB
            blocks
            block   groups x d_B x d_A  rows  way   operations  stored as  index
            ------  ------------------  ----  ----  ----------  ---------  -----
            weight  1 x 3 x 5              1  rows      7.76 k  rows       560 B
        """
        check_alone(train, "The cost")
        storage = Storage(rank, compression, dtype)
        request = Request(queries, train, of, of_train, memory=memory, query_rank=query_rank)
        return cost_of(self._stream(request), storage)

    def index(
        self,
        train: EmpiricalRisk,
        *,
        rank: int | None = None,
        compression: Compression = "low rank",
        dtype: torch.dtype = torch.float32,
        of_train: Quantity = "loss",
        file: str | Path | None = None,
        shard_bytes: int = 2**28,
    ) -> Index:
        """Compute the gradients of training data once, and store them for products with the gradients of many queries.

        If the folder has a complete index of the same model, curvature, settings and data, no gradient is computed. All
        data are read once and compared with the index by digests. If the process was interrupted before the index was
        complete, only the missing gradients are computed.

        Args:
            train: The training data.
            rank: If `None`, gradients are not compressed. Each block is stored as rows or as matrices, whichever takes
                fewer bytes. If a number is given, blocks are compressed if that takes fewer bytes.
            compression: `"low rank"` keeps `rank` singular vectors of every example's matrix. `"projected"` keeps
                `rank` coordinates of each block, along the leading eigenvectors of the curvature.
            dtype: Dtype of the stored numbers: `torch.float32`, `torch.bfloat16` or `torch.float64`.
            of_train: As in `scores`.
            file: A folder, which is created if it does not exist. If not given, gradients are kept in memory.
            shard_bytes: Write a shard whenever this many bytes have been computed. An interruption loses at most about
                this many bytes.

        Returns:
            The index: `index.scores(queries)`, `index.top(queries, k)`, `index.self_scores()`. `index.error` is the
            measured relative error of scores due to compression and dtype.

        Raises:
            StorageError: If the folder has an index of something else (the message says what differs), or a damaged
                one.
            ModelError: If a setting is invalid, or the inverse of a block has no eigenbasis to project onto.

        Example:
            >>> from kfs import KFAC
            >>> _ = torch.manual_seed(0)
            >>> data = torch.rand(20, 4), torch.randint(3, (20,))
            >>> train = EmpiricalRisk(torch.nn.Linear(4, 3), torch.nn.CrossEntropyLoss(), data)
            >>> influence = Influence(KFAC(train))
            >>> index = influence.index(train)
            >>> torch.allclose(index.scores(train), influence.scores(train, train), atol=1e-5)
            True
            >>> print(index)
            Index of 20 gradients of Linear with CrossEntropyLoss (mean): 1 block, float32
              640 B in memory, 1 shard, relative error of scores below 1e-05
            blocks
            block   groups x d_B x d_A  stored as
            ------  ------------------  ---------
            weight  1 x 3 x 5           rows
        """
        storage = Storage(rank, compression, dtype)
        how = IndexSettings(self.K, self.inverse, self._damping, self._method, train, of_train, storage, shard_bytes)
        with _agreed(train, "index"):
            return Index(how, file)

    def _stream(self, request: Request) -> Stream:
        """Check the request, and return a stream over queries and training data."""
        request.check(self.K)
        return Stream(self.K, self.inverse, request)


def _chosen_damping(damping: Damping | None, weight_decay: float | None) -> Damping:
    """Return the damping, the weight decay in its place, or the default damping `Relative(0.1)`."""
    if weight_decay is None:
        return Relative(0.1) if damping is None else damping
    if damping is not None:
        raise ModelError(
            f"Both damping={damping!r} and weight_decay={weight_decay!r} are given, and both set the damping.",
            "Pass one of them.",
        )
    if isinstance(weight_decay, bool) or not isinstance(weight_decay, int | float) or not 0 < weight_decay < inf:
        raise ModelError(
            f"weight_decay is {weight_decay!r}.",
            "Use the positive number that the optimizer was given. If it had no weight decay, leave it out.",
        )
    return float(weight_decay)


def _inverse_of(K: BlockDiagonal, damping: Damping, method: Method) -> BlockDiagonal:
    """Return the damped inverse; raise `SolverError` if a block is singular.

    `K.inverse` adds a small number to singular blocks, which would dominate all scores.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error", KfsWarning)
        try:
            return K.inverse(damping, method)
        except KfsWarning as warning:
            K.power(-1.0)  # raises an error with the name of the block
            raise SolverError(f"A block is singular: {warning}", "Pass damping.") from warning


def _agreed(train: object, where: str) -> AbstractContextManager[None]:
    """Return a context that raises on all ranks of the training data if one of them raises."""
    return train.ranks.agreed(where) if isinstance(train, EmpiricalRisk) else nullcontext()  # other types raise later
