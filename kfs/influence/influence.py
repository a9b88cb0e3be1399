r"""Influence functions with block-diagonal curvature: scores of pairs of data, by products of gradients.

Training data $n$ with weight $1 + \epsilon$ move the parameters by $-\epsilon R H^{-1} g_n$, where $R$ is the reduction
factor of the training loss, $g_n$ the gradient of the example's own term, and $H$ the curvature. So a quantity of a
query with gradient $g_q$ changes by $-\epsilon R\, g_q^\top H^{-1} g_n$. The score is $g_q^\top H^{-1} g_n$.
"""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Literal, overload

import torch
from torch import Tensor

from kfs.display.describe import Described, Description, counted, kind
from kfs.errors import ModelError
from kfs.factors.blocks import BlockDiagonal, Damping, Method
from kfs.influence.checks import check_alone, check_choice, check_count, chosen_damping, inverse_of
from kfs.influence.cost import Cost, QueryError, cost_of, query_error
from kfs.influence.index import Index, settings_of
from kfs.influence.scoring import BY, By, Normalize, Request, Stream, Top, all_scores, best, check_request, self_scores
from kfs.influence.stored import Compression
from kfs.losses.quantities import Quantity
from kfs.problem.risk import EmpiricalRisk


class Influence(Described):
    """Influence functions: which training data made a model predict what it does?

    A positive score means that the training example helps: without it, the query's loss is predicted to be higher, by
    `train.reduction_factor * score`. (For `"log-probability"` and `"margin"` of queries, of which more is better,
    helpful data have negative scores.) Scores are `g_q^T (K + damping)^-1 g_n` with gradients of single data, as in
    other libraries: they have no `1 / N`.

    Args:
        K: The curvature of the training loss: `KFAC`, `EKFAC`, or another operator with blocks.
        damping: What is added to the curvature, as in `K.inverse`. By default `Relative(0.1)`, if there is no weight
            decay.
        method: How it is added, as in `K.inverse`.
        weight_decay: The L2 penalty of training, in place of `damping`: the number that the optimizer was given, which
            adds `weight_decay / 2` times the squared norm of the parameters to the loss that `K` is the curvature of.
            Its curvature is this number, so that the damped matrix is the curvature of what was minimized.

    Attributes:
        K: The curvature.
        inverse: The damped inverse.

    Raises:
        ModelError: If the operator has no blocks, or is not symmetric, or there are damping and weight decay.
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
        damping: Damping | None = None,
        method: Method = "exact",
        *,
        weight_decay: float | None = None,
    ) -> None:
        if not isinstance(K, BlockDiagonal):
            raise ModelError(
                f"Influence takes an operator with blocks, and this is a {type(K).__name__}.",
                "Use kfs.KFAC or kfs.EKFAC, or kfs.factors.exact_blocks(risk) for small layers. For products "
                "with an exact inverse, see kfs.operators.solve.",
            )
        if not K.symmetric:
            raise ModelError("The operator is not symmetric.", "Use the curvature itself, and not a product with it.")
        self.K = K
        self._damping = chosen_damping(damping, weight_decay)
        self._method = method
        self.inverse = inverse_of(K, self._damping, method)

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
            queries: Data to explain, with the same model and parameters.
            train: Data to explain them by. If processes share them, all pass the same queries and get all scores.
            of: Which quantity of queries is explained, as in `kfs.per_datum`: `"loss"`, `"log-probability"`,
                `"margin"`, or a function of one example's prediction and target.
            of_train: Which quantity of training data is differentiated. Models are trained by their `"loss"`.
            by: `None` for scores `[queries, train]`. `"block"` or `"layer"` for a dictionary of such scores, which sum
                up to the total. `"token"` for the share of every position of training data, `[queries, train,
                positions]`, zero behind the last position of a shorter one.
            normalize: `"cosine"` divides by the roots of both self-scores, so that scores are between -1 and 1.
                `"self"` divides by the root of the training example's alone (Barshan et al., 2020): otherwise, unusual
                data with large gradients have large scores for most queries. Shares of blocks are divided by the same
                numbers as their sum.
            memory: How many bytes of the queries' gradients are kept. If they do not fit, there is a pass over the
                training data for every part of the queries that does.
            query_rank: Keep this many singular vectors of each query's gradient, multiplied with the inverse, for every
                block where that takes fewer operations (Grosse et al., 2023). `query_error` says what it costs.

        Returns:
            The scores, on the model's device.

        Raises:
            ModelError: If models or parameters differ from each other or from those of the operator.
            DataError: If there are no data, a gradient is not finite, or positions are not those of tokens.
        """
        with _agreed(train, "scores"):
            check_choice("by", by, BY)
            return all_scores(self._stream(Request(queries, train, of, of_train, normalize, memory, query_rank)), by)

    def self_scores(self, train: EmpiricalRisk, *, of: Quantity = "loss") -> Tensor:
        """Compute the score of every example with itself, `[train]`.

        It is large for data that are hard to learn, and for many that are mislabelled.

        Args:
            train: The data.
            of: Which quantity is differentiated, as in `scores`.
        """
        with _agreed(train, "self-scores"):
            return self_scores(self._stream(Request(train, train, of, of, None, 0)))

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
            query_rank: As in `scores`.

        Raises:
            DataError: If there are fewer than `k` training data.
        """
        with _agreed(train, "top"):
            return best(self._stream(Request(queries, train, of, of_train, normalize, memory, query_rank)), k)

    def query_error(
        self,
        queries: EmpiricalRisk,
        train: EmpiricalRisk,
        query_rank: int,
        *,
        of: Quantity = "loss",
        of_train: Quantity = "loss",
    ) -> QueryError:
        """Say what `query_rank=` costs: a bound by the singular values that it leaves out, and the error as measured.

        Args:
            queries: As in `scores`.
            train: As in `scores`. Scores with data of the first batch are compared.
            query_rank: How many singular vectors of every query are kept.
            of: As in `scores`.
            of_train: As in `scores`.

        Raises:
            ModelError: If there is no rank, or models or parameters differ.
        """
        check_alone(train, "The error")
        # Without a rank nothing is compressed, and there is no error to speak of.
        check_count("query_rank", query_rank, optional=False)
        return query_error(self._stream(Request(queries, train, of, of_train, None, 0, query_rank)))

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
        """Say what scores and an index would cost, before they are computed: operations, bytes and passes.

        One batch of queries and one of training data are run, since they say how many rows every layer has. Counts are
        those by which the ways of multiplication are chosen. Those of forward and backward passes are products with
        weights that the curvature covers, also of the first layer, through which nothing is sent back. Attention
        between positions, for example, comes on top.

        Args:
            queries: As in `scores`.
            train: As in `scores`.
            of: As in `scores`.
            of_train: As in `scores`.
            memory: As in `scores`.
            query_rank: As in `scores`.
            rank: As in `index`.
            compression: As in `index`.
            dtype: As in `index`.

        Example:
            >>> from kfs import KFAC
            >>> model = torch.nn.Linear(4, 3)
            >>> data = torch.rand(20, 4), torch.randint(3, (20,))
            >>> train = EmpiricalRisk(model, torch.nn.CrossEntropyLoss(), data)
            >>> Influence(KFAC(train), method="factored").cost(train, train)
            Scores of 20 queries and 20 training data: 10.2 k operations
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
        stream = self._stream(Request(queries, train, of, of_train, None, memory, query_rank))
        return cost_of(stream, rank, compression, dtype)

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
        """Compute the gradients of training data once, and keep them, to be multiplied with those of many queries.

        If the folder has a complete index of the same model, curvature, settings and data, no gradient is computed; all
        data are read once and compared with those of the index by digests. If the process ended before it was complete,
        what is missing is computed.

        Args:
            train: The training data.
            rank: `None` keeps all numbers: for each block, as rows or as matrices, whichever takes fewer bytes. A
                number compresses blocks for which that takes fewer bytes.
            compression: `"low rank"` keeps this many singular vectors of every example's matrix. `"projected"` keeps
                this many coordinates of each block: those of the leading eigenvectors of the curvature.
            dtype: Dtype of the stored numbers: `torch.float32`, `torch.bfloat16` or `torch.float64`.
            of_train: As in `scores`.
            file: A folder, which is made if it does not exist. By default, gradients are kept in memory.
            shard_bytes: Write a file whenever this many bytes are there. So much is lost if the process ends.

        Returns:
            The index: `index.scores(queries)`, `index.top(queries, k)`, `index.self_scores()`. `index.error` is the
            relative error of scores that compression and dtype cause, as measured.

        Raises:
            StorageError: If the folder has an index of something else (what differs is said), or a damaged one.
            ModelError: If a setting does not exist, or the inverse of a block has no eigenbasis to project onto.

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
        check_alone(train, "An index")
        settings = settings_of(self._damping, self._method, rank, compression, dtype)
        return Index(self.K, self.inverse, train, of_train, settings, file, shard_bytes)

    def _stream(self, request: Request) -> Stream:
        """Check what was asked for."""
        check_request(self.K, request)
        return Stream(self.K, self.inverse, request)


def _agreed(train: object, where: str) -> AbstractContextManager[None]:
    """Return a context that all processes that share training data leave in the same way."""
    return train.ranks.agreed(where) if isinstance(train, EmpiricalRisk) else nullcontext()  # It is refused later.
