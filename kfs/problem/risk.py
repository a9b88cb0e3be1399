r"""EmpiricalRisk: model, loss, data and parameters. The one noun that everything else takes.

$$
\mathcal{L}(\theta) = R \sum_{n=1}^N c(f(x_n, \theta), y_n)
$$

The reduction factor $R$ is that of the whole data set, counted once, whatever the batches are. Nothing that is
computed here or from here changes the model, its gradients, its mode, its buffers or the random state, not even
after an error. Losses live in `kfs.losses`, taking data apart in `kfs.problem.data`, choosing parameters in
`kfs.problem.parameters`, and derivatives beyond the gradient in `kfs.operators`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from math import isfinite
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from kfs.display.describe import Described, Description, batches_and_data, vector
from kfs.display.progress import tracked
from kfs.distributed import Group, Same, added_up, check_same
from kfs.errors import DataError
from kfs.losses import Loss, describe
from kfs.problem.data import (
    Batch,
    Fingerprint,
    Mask,
    MaskSource,
    arguments,
    as_batches,
    batch_to_device,
    copies_end,
    default_unpack,
    fingerprint,
    repeatably,
    unpacked,
)
from kfs.problem.data_shards import part_of
from kfs.problem.isolation import (
    UnusedDraws,
    check_module,
    check_no_inference_mode,
    evaluating,
    exchanged,
    random_state,
    restored,
    unchanged,
)
from kfs.problem.outputs import check_batch_axis, prediction_in
from kfs.problem.parameters import (
    Params,
    Places,
    check_not_meta,
    function_params,
    leaves_of,
    module_params,
    switched_on,
)
from kfs.problem.repeatability import RepeatabilityCheck
from kfs.problem.torch_fixes import ExactDerivatives, WithoutGraph, explained, no_hooks_on_saved_tensors
from kfs.problem.whole_parameters import WholeParameters, check_same_data, model_to_run
from kfs.runtime import sync
from kfs.runtime.nested import tensors_in
from kfs.runtime.precision import at_least_float32
from kfs.runtime.sync import DeferredChecks, not_finite, refuse_not_finite

_COPY = "Copy those of rank 0: for {0} in model.{1}(): torch.distributed.broadcast({0}.detach(), 0)."


class EmpiricalRisk(Described):
    """The empirical risk of a model on a data set, as a function of (some of) its parameters.

    Args:
        model: A `torch.nn.Module`, also a sharded one, or a function `f(params, x)` with `params` a dictionary of
            tensors. It returns predictions, an object or mapping with `logits`, or a tuple that starts with them.
        loss: A loss module of `torch.nn`, a `kfs.losses.Loss`, or a function of one example's prediction and target.
        data: One `(X, y)`, a mapping (a batch as in Hugging Face), an iterable of batches, or a `DataLoader`. It is
            iterated more than once and must give the same data in the same order every time. Numbers that PyTorch draws
            for that (shuffling, augmentation) are made the same; those of NumPy and others are not. Every pass checks
            its first batch. After changing data on purpose, also in place, make a new `EmpiricalRisk`: this one
            remembers what it has counted. Inputs that are a tuple or a list are the arguments of a module. A mapping
            has its keyword arguments if `forward` takes them, and is its only argument otherwise.
        params: For a module, which parameters to consider: a list of names, or a dictionary of names and values. By
            default all that require gradients. For a function, the dictionary of its parameters.
        unpack: Splits a batch into `(x, y)`. By default pairs are taken apart, and mappings at their key `"labels"`.
        progress: Whether to show how far a computation is, in a terminal or a notebook. By default, computations that
            take longer than two seconds are shown.
        num_data: Number of examples, if you know it: it saves operators a first pass over all batches, which counts
            them. Every complete pass checks it. Data with ignored or weighted targets need to be counted. With several
            processes, it is the number of this one's data.
        mask: Which positions of the inputs are there, and which ones are padding: the name of a tensor `[N, S]` in
            batches that are mappings, or a function of the inputs that returns one. It is zero, or `False`, at padding.
            By default `attention_mask`, if there is one. KFAC leaves out what no prediction that counts depends on;
            an audit measures which operations follow the mask, and what no mask says.
        group: The processes that share the computation: a process group such as `torch.distributed.group.WORLD`, or a
            device mesh with one axis. Then `data` are those of this process, in the order of ranks, and everything
            that is computed is that of all data together. All of them call the same functions. Data from `kfs.shard`
            know their group. By default this process is alone.

    Hooks on the model run with every pass here, since they may change what it computes. Remove those that only record.

    Attributes:
        loss: The description of the loss.
        params: The parameters that are considered, by name.
        ranks: The processes that share the computation, or this one alone.
        with_model: Makes the risk of another model, with the same loss and data: `risk.with_model(other)`.

    Raises:
        ModelError: If the model's predictions depend on chance or on other data, or a parameter is unknown.
        DataError: If the data can be iterated only once, or a batch cannot be taken apart. Later, if data change.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> X, y = torch.rand(10, 3), torch.rand(10, 2)
        >>> risk = EmpiricalRisk(nn.Linear(3, 2), nn.MSELoss(), (X, y))
        >>> risk.num_data, risk.reduction_factor
        (10, 0.1)
        >>> risk.gradient()["weight"].shape
        torch.Size([2, 3])
    """

    def __init__(
        self,
        model: nn.Module | Callable[[Params, Any], Any],
        loss: object,
        data: object,
        params: Sequence[str] | Mapping[str, Tensor] | None = None,
        unpack: Callable[[Any], tuple[Any, Tensor]] | None = None,
        progress: bool | None = None,
        num_data: int | None = None,
        group: Group | None = None,
        mask: Mask = None,
    ) -> None:
        """Check what can be checked without running the model."""
        self.ranks, own_data, start = part_of(data, group)
        with self.ranks.agreed("EmpiricalRisk"):
            self.model = model_to_run(model)
            self.loss: Loss = describe(loss)
            own = self.model
            self.params = module_params(own, params) if isinstance(own, nn.Module) else function_params(params)
            self.progress = progress
            self.mask_source = MaskSource(mask)
            self.whole = WholeParameters(self.model, self.ranks)
            self._data = as_batches(own_data)
            self._unpack = default_unpack if unpack is None else unpack
            check_same_data(self.model, self.ranks, self._data, self._unpack)
            self._same_data = RepeatabilityCheck(num_data, self.ranks, start)
            # It has no reference to this model.
            self.with_model = partial(
                EmpiricalRisk,
                loss=loss,
                data=data,
                unpack=unpack,
                progress=progress,
                num_data=num_data,
                group=group,
                mask=mask,
            )
            self.flags: DeferredChecks | None = (
                None  # takes note of bad data, in passes that do not wait for an accelerator
            )
            self._draws = UnusedDraws(self.device)
            self._without_graph = WithoutGraph()
            self._leaves: Params = {}  # stand for parameters that are not the model's own
            self._places = Places()
            self.check_model()

    @property
    def num_data(self) -> int:
        """The number of examples, counted on first use."""
        return self.count()[0]

    @property
    def num_batches(self) -> int | None:
        """The number of batches, if the data say so."""
        return len(self._data) if isinstance(self._data, Sized) else None

    @property
    def reduction_factor(self) -> float:
        """The factor `R`, for the whole data set."""
        return self.loss.reduction_factor(self.count()[1])

    @property
    def device(self) -> torch.device:
        """Where the parameters are; batches are moved there."""
        return next(iter(self.params.values())).device

    @property
    def dtype(self) -> torch.dtype:
        """The parameters' common dtype."""
        return next(iter(self.params.values())).dtype

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype to sum over data in: half precision would lose all but the first few hundred terms."""
        return at_least_float32(self.dtype)

    @property
    def about(self) -> str:
        """Model and loss in a few words. A function has a name of its own, other models that of their class."""
        name = getattr(self.model, "__name__", type(self.model).__name__)
        return f"{name} with {self.loss.name} ({self.loss.reduction})"

    @property
    def about_data(self) -> str:
        """What is known about the data, without a pass over them."""
        return batches_and_data(self.num_batches, self._same_data.known_number)

    def describe(self) -> Description:
        """Describe model, loss, parameters and data."""
        return Description(f"EmpiricalRisk of {self.about}", (vector(self.params, "parameter"), self.about_data))

    def value(self) -> float:
        """Evaluate the risk. It equals the loss module's value on all data at once.

        Raises:
            DataError: If a prediction or the value is not finite.
        """
        total = 0.0
        with self.together("value"):
            with self.untouched(), torch.no_grad():
                for batch in self.batches("value"):
                    self.finite(f := self.evaluate(batch), batch)
                    total += float(self.loss.criterion(f, batch.y).double().sum())
            total = sum(self.ranks.gather("value", total))
            if not isfinite(total):
                raise DataError("The risk is not finite.", "Look for NaN or infinity in the targets.")
            return self.reduction_factor * total

    def gradient(self) -> Params:
        """Compute the gradient of the risk by parameter name; zero for a parameter that is not used.

        The model's own `.grad` fields are not touched.
        """
        with self.together("gradient"):
            with self.untouched(), torch.enable_grad(), explained():
                leaves = self.leaves()
                total = {name: torch.zeros_like(p, dtype=self.sum_dtype) for name, p in leaves.items()}
                for batch in self.batches("gradient"):
                    f = self.predict(leaves, batch)
                    self.finite(f.detach(), batch)
                    c = self.loss.criterion(f, batch.y).sum()
                    if not c.requires_grad:  # a model that uses no parameter at all
                        continue
                    gradients = torch.autograd.grad(c, list(leaves.values()), allow_unused=True)
                    for name, g in zip(total, gradients, strict=True):
                        if g is not None:  # a parameter that this batch does not use
                            total[name] += g
            total = added_up(self.ranks, "gradient", total)
            return {name: (self.reduction_factor * g).to(self.dtype) for name, g in total.items()}

    @contextmanager
    def together(
        self, where: str, settings: Mapping[str, Any] | None = None, vectors: Params | None = None
    ) -> Iterator[None]:
        """Compute something with all processes of the group in this context: from the same model, with errors of all.

        One process alone has nothing to do. Arguments are those of `check_same`.
        """
        if not self.ranks.are_several:
            yield
            return
        with self.ranks.agreed(where), self.whole.held(self.params):
            self.check_same(where, settings, vectors)
            yield

    def check_same(self, where: str, settings: Mapping[str, Any] | None = None, vectors: Params | None = None) -> None:
        """Refuse models, losses, settings and vectors that differ between the processes of the group.

        Args:
            where: What is about to be computed, in words.
            settings: Of the computation, by name: small values with a `repr`.
            vectors: To multiply with, by name.

        Raises:
            DistributedError: If something differs. It names what.
            ModelError: As `check_model`, whose errors are about this process.
        """
        self.check_model()
        module = self.model if isinstance(self.model, nn.Module) else nn.Module()
        with self.whole.held(self.params):
            params = {name: self.whole.of(p) for name, p in self.params.items()}
            others = {n: self.whole.of(p) for n, p in module.named_parameters() if n not in params}
            buffers = {name: self.whole.of(b) for name, b in module.named_buffers()}
            modes = {n or "the model": "train" if m.training else "eval" for n, m in module.named_modules()}
            facts = {
                "Settings": Same(settings or {}, "Pass the same arguments in all processes."),
                "Losses": Same(self.loss.attributes(), "Pass the same loss in all processes."),
                "Modes of modules": Same(modes, "Call model.eval() in all processes."),
                "Parameters": Same(params | others, _COPY.format("p", "parameters")),
                "Buffers": Same(
                    buffers,
                    "Running statistics are those of each process's own data if training has not synchronized them. "
                    + _COPY.format("b", "buffers"),
                ),
                "The vectors to multiply with": Same(
                    vectors or {}, "Broadcast vectors, or draw them from the same seed in all processes."
                ),
            }
            check_same(self.ranks, where, facts)

    def leaves(self) -> Params:
        """Return the parameters' values as leaves of a new computation graph."""
        return {name: p.detach().requires_grad_() for name, p in self.params.items()}

    def predict(self, params: Params, batch: Batch, within: AbstractContextManager[Any] | None = None) -> Tensor:
        """Evaluate the model on a batch, at the given parameters, and check what comes out.

        Args:
            params: Values for the parameters, by name, such as `leaves()`.
            batch: From `batches()`.
            within: A context to run the model in, and nothing but the model.

        Returns:
            Predictions `[N, ...]`: the model's output, its `logits` (as in Hugging Face), or the first of several.
        """
        recorded = batch.recorded is not None  # for a recorded computation, all that follows was checked before
        before = [] if recorded else random_state(self.device)
        with unchanged(tensors_in(batch.x)), within or nullcontext():
            output = self._output(params, batch)
        if not recorded:  # at the parameters as they are: those given may be tracked by autograd, `vmap` or a capture
            own = lambda: prediction_in(self._output(self.params, batch))  # noqa: E731
            self._draws.check(before, lambda: self._without_graph(own))
        f = output if isinstance(output, Tensor) else prediction_in(output)
        check_batch_axis(f, batch.y)
        if self.flags is None:
            self.loss.check_now(f, batch.y)
        else:
            self.loss.check(f, batch.y)
            self.flags.note(self.loss.wrong(f, batch.y), batch.start)
        return f

    def evaluate(self, batch: Batch) -> Tensor:
        """Evaluate the model on a batch, at `params`, for its values alone: without a graph."""
        return self._without_graph(lambda: self.predict(self.params, batch))

    def finite(self, f: Tensor, batch: Batch) -> None:
        """Refuse predictions with NaN or positive infinity (negative infinity masks a class)."""
        if self.flags is None:
            refuse_not_finite(f, batch.first)
        else:
            self.flags.note(not_finite(f), batch.start)

    @contextmanager
    def checking_later(self, own: DeferredChecks | None = None) -> Iterator[Callable[[], None]]:
        """Let checks of values on an accelerator only set flags (`own` or new ones) here; what it returns reads them.

        Raises:
            KfsError: When flags are read, if an example has failed a check: what is wrong with it.
        """
        outer = self.flags  # a hook of the model may compute something with the same risk
        self.flags = flags = own or (DeferredChecks(self.device) if sync.is_asynchronous(self.device) else None)

        def check() -> None:
            datum = None if flags is None else flags.first_failure()
            if datum is not None:
                self.flags = None
                self._explain(datum)

        try:
            yield check
        finally:
            self.flags = outer

    def _explain(self, datum: int) -> NoReturn:
        """Say what is wrong with an example for which a flag was raised, by looking at it again."""
        for batch in self.batches():
            if batch.first <= datum < batch.first + len(batch.y):
                self.finite(self.evaluate(batch), batch)
        raise DataError(
            f"The prediction or the target of example {datum} could not be used, and now it can.",
            "Pass data that give the same values every time, and a model that returns the same predictions.",
        )

    def batches(self, task: str = "") -> Iterator[Batch]:
        """Iterate over the data, on the parameters' device, with progress if asked for; empty batches are left out.

        A loader that shuffles does so in the same way every time. Neither counts nor the first batch may change. With
        several processes, these are the data of this one, with their indices among all data.
        """
        if self._same_data.start is None:  # other processes have data before those of this one
            self.count()
        return self._own_batches(task, self._same_data.start or 0)

    def _own_batches(self, task: str, start: int) -> Iterator[Batch]:
        """Iterate over the data of this process, of which the first one has an index among all data."""
        data: Iterable[Any] = repeatably(self._data)
        if task:
            data = tracked(data, task, self.num_batches, self.progress, "batch")
        first = 0
        count: float | Tensor = 0  # an integer, so that counts of integers on a device stay exact
        seen: Fingerprint | None = None
        several = self.ranks.are_several
        for raw in data:
            if several:
                self.ranks.listen()
            x, y = unpacked(self._unpack, raw)
            if len(y):
                if seen is None:
                    seen = fingerprint(x, y)  # where the data are: those on a CPU need not wait for an accelerator
                    self._same_data.check_first_batch(seen)
                batch, copied = (
                    batch_to_device(x, y, start + first, self.device, self.loss.count),
                    copies_end(x, y, self.device),
                )
                yield batch
                copied()
                count = count + batch.counted
            first += len(y)
        self._same_data.check_count(first, count, self.loss.reduction == "mean", seen)

    def count(self) -> tuple[int, float]:
        """Return the number of examples and what a mean over them divides by; the first complete pass over them counts.

        Call it before a loop over batches that needs it: not every loader can be iterated a second time meanwhile.
        """
        if self._same_data.counted_by_all is not None:
            return self._same_data.counted_by_all
        with self.ranks.agreed("counting"):
            if self._same_data.counted is None:
                for batch in self._own_batches("counting", 0):
                    if self._same_data.extrapolate(batch.first, len(batch.y), batch.counted):
                        break
        return self._same_data.count_all(self.loss.reduction == "mean")

    def check_model(self) -> None:
        """Refuse a module whose prediction for one example depends on chance or on other data."""
        self.check_values()
        if isinstance(self.model, nn.Module):
            check_module(self.model)

    def check_values(self) -> None:
        """Refuse parameters without values."""
        check_not_meta(self.device)

    @contextmanager
    def untouched(self, first_order: bool = False) -> Iterator[None]:
        """Run the model such that random state and buffers are as before, and that every derivative exists.

        Args:
            first_order: Whether the model is run at `params`, for plain gradients with respect to its activations. Then
                no operation needs a replacement, and all of `params` require gradients in this context: otherwise
                nobody could tell a parameter from what was detached from it.

        Raises:
            ModelError: If the model is in a training mode that matters, or changed a buffer.
        """
        self.check_model()
        check_no_inference_mode()
        self._draws = UnusedDraws(self.device)  # the model may have been changed since
        # The faster attention kernels cannot be differentiated twice or forward. A checkpoint runs the module again
        # during the backward pass: with the same operations as before, but with the module's own parameters.
        with (
            self._with_whole_params(),
            restored(self.model, self.device),
            nullcontext() if first_order else sdpa_kernel(SDPBackend.MATH),
            nullcontext() if first_order else ExactDerivatives(),
            nullcontext() if self._at_own_params(first_order) else no_hooks_on_saved_tensors(),
            self._trainable() if first_order else nullcontext(),
        ):
            yield

    @contextmanager
    def _with_whole_params(self) -> Iterator[None]:
        """Let the model, and `params`, have all numbers of parameters that are sharded over processes."""
        given = self.params
        try:
            with self.whole.in_place(given) as self.params:
                yield
        finally:
            if self.params is not given:  # nobody holds what was gathered
                self.params, self._leaves, self._places = given, {}, Places()

    def _trainable(self) -> AbstractContextManager[None]:
        """Return a context in which all parameters require gradients; after it, they are as before."""
        # A checkpoint, which runs the model again, has to find its own parameters so. Others are replaced by leaves.
        if isinstance(self.model, nn.Module) and self._at_own_params(frozen=True):
            return switched_on(self.params.values())
        self._leaves = leaves_of(self.params, self._leaves)
        return exchanged(self, self._leaves)

    def _output(self, params: Params, batch: Batch) -> Any:
        """Evaluate the model, and return what it returns."""
        with evaluating():
            if not isinstance(self.model, nn.Module):
                return self.model(params, batch.x)
            args, kwargs = arguments(batch.x, self.model)
            if params is self.params and self._at_own_params(frozen=True):
                return self.model(*args, **kwargs)
            return functional_call(self.model, params, args, kwargs)

    def _at_own_params(self, frozen: bool) -> bool:
        """Whether parameters are the model's own tensors as it uses them: not other values, frozen only if allowed."""
        if not isinstance(self.model, nn.Module):
            return True
        has_them = self._places.have(self.model, self.params)
        return has_them and (frozen or all(p.requires_grad for p in self.params.values()))
