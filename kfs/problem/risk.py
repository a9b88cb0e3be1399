r"""EmpiricalRisk: model, loss, data and parameters in one object, which all other parts of the library accept.

$$
\mathcal{L}(\theta) = R \sum_{n=1}^N c(f(x_n, \theta), y_n)
$$

The reduction factor $R$ belongs to the whole data set. It is counted once and does not depend on the batches. No
computation changes the model, its gradients, its mode, its buffers or the random state, not even after an error.
Losses live in `kfs.losses`, unpacking of data in `kfs.problem.data`, selection of parameters in
`kfs.problem.parameters`, and derivatives beyond the gradient in `kfs.operators`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial, reduce
from math import isfinite
from operator import attrgetter
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from kfs.display.describe import Described, Description, batches_and_data, vector
from kfs.display.progress import tracked
from kfs.distributed import Group, Same, added_up, check_same
from kfs.errors import DataError, DtypeError, ModelError
from kfs.losses import Loss, describe
from kfs.problem.data import (
    Batch,
    Fingerprint,
    Mask,
    MaskSource,
    RepeatabilityCheck,
    arguments,
    as_batches,
    default_unpack,
    fingerprint,
    last_copies,
    repeatably,
    to_device,
    unpacked,
)
from kfs.problem.data_shards import data_of_rank
from kfs.problem.isolation import (
    check_draws,
    check_module,
    check_no_inference_mode,
    evaluating,
    random_state,
    restored,
)
from kfs.problem.offloaded import Offloaded
from kfs.problem.parameters import Params, function_params, leaves_of, module_params, switched_on
from kfs.problem.torch_fixes import CheckedEmbeddings, ExactDerivatives, call_with, explained, no_hooks_on_saved_tensors
from kfs.problem.whole_parameters import WholeParameters, check_same_data, model_to_run
from kfs.runtime import sync
from kfs.runtime.nested import is_named_tuple, tensors_in
from kfs.runtime.precision import at_least_float32
from kfs.runtime.sync import DeferredChecks, not_finite

_dtype_of, _kind_of = attrgetter("dtype"), attrgetter("device", "dtype")
_COPY = "Copy them from rank 0: for {0} in model.{1}(): torch.distributed.broadcast({0}.detach(), 0)."


class EmpiricalRisk(Described):
    """The empirical risk of a model on a data set, as a function of (some of) its parameters.

    Args:
        model: A `torch.nn.Module`, which may be sharded, or a function `f(params, x)` where `params` is a dictionary
            of tensors. It returns predictions, an object or mapping with `logits`, or a tuple that starts with
            predictions; or several outputs, of which the loss names one: `kfs.losses.describe(loss, output=...)`.
        loss: A loss module of `torch.nn`, a `kfs.losses.Loss`, or a function of one example's prediction and target.
        data: A pair `(X, y)`, a mapping (a batch as in Hugging Face), an iterable of batches, or a `DataLoader`. It is
            iterated more than once and must yield the same data in the same order every time. Random numbers that
            PyTorch draws for shuffling or augmentation are made reproducible; random numbers of NumPy and other
            libraries are not. Every pass checks its first batch. After changing data on purpose, also in place, create
            a new `EmpiricalRisk`: this one caches its counts. Inputs that are a tuple or a list contain the arguments
            of a module. A mapping contains keyword arguments if `forward` accepts them; otherwise it is the only
            argument.
        params: For a module, the parameters to consider: a list of names, or a dictionary of names and values. By
            default, all parameters that require gradients. For a function, the dictionary of its parameters.
        unpack: Splits a batch into `(x, y)`. By default, pairs are unpacked, and mappings are split at their key
            `"labels"`.
        progress: Whether to show the progress of computations in a terminal or a notebook. By default, computations
            that take longer than two seconds are shown.
        num_data: Number of examples, if it is known. This saves operators a first pass over all batches for counting.
            Every complete pass checks the number. Data with ignored or weighted targets must be counted. With several
            processes, it is the number of examples of this process.
        mask: Tells real positions of the inputs from padding: the name of a tensor `[N, S]` in batches that are
            mappings, or a function of the inputs that returns such a tensor. It is zero or `False` at padding. By
            default, `attention_mask` is used if it exists. KFAC drops positions that do not affect any prediction that
            counts; an audit measures which operations follow the mask, and which positions no mask describes.
        group: The processes that share the computation: a process group such as `torch.distributed.group.WORLD`, or a
            device mesh with one axis. Then `data` is the data of this process, in the order of ranks, and all results
            are for the data of all processes together. All processes must call the same functions. Data from
            `kfs.shard` store their group. By default, this process computes alone.

        by_layer: Whether the parameters of a model that `fully_shard` has sharded are gathered while their layer runs,
            instead of all together. It takes less memory, and more messages. `KFAC`, `EKFAC` and `Influence.scores`
            support it; an audit also holds gradients of all parameters, unless it is disabled.

    Hooks on the model run in every pass, since they may change what the model computes. Remove hooks that only record.

    Attributes:
        loss: The description of the loss.
        params: The parameters that are considered, by name.
        ranks: The processes that share the computation, or this process alone.
        with_model: Creates the risk of another model with the same loss and data: `risk.with_model(other)`.

    Raises:
        ModelError: If the model's predictions are random or depend on other examples, or a parameter is unknown.
        DataError: If the data can be iterated only once, or a batch cannot be unpacked. Later, if the data change.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> X, y = torch.rand(10, 3), torch.rand(10, 2)
        >>> risk = EmpiricalRisk(nn.Linear(3, 2), nn.MSELoss(), (X, y))
        >>> risk.num_data, risk.reduction_factor
        (10, 0.1)
        >>> risk.gradient()["weight"].shape
        torch.Size([2, 3])
    """

    _needs_values = True  # `kfs.inspect` needs only shapes

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
        by_layer: bool = False,
    ) -> None:
        # All checks that need no forward pass happen here.
        self.ranks, own_data, start = data_of_rank(data, group)
        with self.ranks.agreed("EmpiricalRisk"):
            # Model, loss and parameters.
            self.model = model_to_run(model)
            self.loss: Loss = describe(loss)
            own = self.model
            chosen = module_params(own, params) if isinstance(own, nn.Module) else function_params(params)
            self._offloaded = Offloaded(own, chosen)
            self.params = self._offloaded.params
            self.progress = progress
            self.mask_source = MaskSource(mask)
            self.whole = WholeParameters(self.model, self.ranks, by_layer)

            # Data.
            self._data = as_batches(own_data)
            self._unpack = default_unpack if unpack is None else unpack
            check_same_data(self.model, self.ranks, self._data, self._unpack)
            self._same_data = RepeatabilityCheck(num_data, self.loss.reduction == "mean", self.ranks, start)

            # It holds no reference to this model, so that the model can be freed.
            self.with_model = partial(
                EmpiricalRisk,
                loss=loss,
                data=data,
                unpack=unpack,
                progress=progress,
                num_data=num_data,
                group=group,
                mask=mask,
                by_layer=by_layer,
            )

            # State of passes. `flags` records invalid data in passes that do not synchronize with an accelerator.
            self.flags: DeferredChecks | None = None
            self._unused_draws: Sequence[Tensor] | None = None  # see `check_draws`
            self._differentiates = False  # whether the model computes derivatives itself, which needs a graph
            self._leaves: Params = {}  # replace parameters that are not the model's own tensors
            self.check_model()

    @property
    def num_data(self) -> int:
        """The number of examples, counted on first use."""
        return self.count()[0]

    @property
    def num_batches(self) -> int | None:
        """The number of batches if the data have a length; otherwise `None`."""
        return len(self._data) if isinstance(self._data, Sized) else None

    @property
    def reduction_factor(self) -> float:
        """The reduction factor `R` of the whole data set."""
        return self.loss.reduction_factor(self.count()[1])

    @property
    def device(self) -> torch.device:
        """The device of predictions, targets and flat vectors: that of the first parameter."""
        return next(iter(self.params.values())).device

    @property
    def dtype(self) -> torch.dtype:
        """The parameters' dtype; if they have several, one that has all of their values."""
        common: torch.dtype = reduce(torch.promote_types, map(_dtype_of, self.params.values()))
        return common

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype for sums over data, at least float32: half precision loses all but the first few hundred terms."""
        return at_least_float32(self.dtype)

    @property
    def about(self) -> str:
        """Short description of model and loss: the name of a function, or the class name of a module."""
        name = getattr(self.model, "__name__", type(self.model).__name__)
        return f"{name} with {self.loss.name} ({self.loss.reduction})"

    @property
    def about_data(self) -> str:
        """Description of the data, as far as it is known without a pass over them."""
        return batches_and_data(self.num_batches, self._same_data.known_number)

    def describe(self) -> Description:
        """Describe model, loss, parameters and data."""
        return Description(f"EmpiricalRisk of {self.about}", (vector(self.params, "parameter"), self.about_data))

    def value(self) -> float:
        """Evaluate the risk. It equals the value of the loss module on all data in one batch.

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
        """Return the gradient of the risk by parameter name; it is zero for an unused parameter.

        The `.grad` attributes of the model's parameters are not changed.
        """
        with self.together("gradient"):
            with self.untouched(), torch.enable_grad(), explained():
                leaves = self.leaves()
                total = {name: torch.zeros_like(p, dtype=self.sum_dtype) for name, p in leaves.items()}
                for batch in self.batches("gradient"):
                    f = self.predict(leaves, batch)
                    self.finite(f.detach(), batch)
                    c = self.loss.criterion(f, batch.y).sum()
                    if not c.requires_grad:  # the model uses no parameter
                        continue
                    gradients = torch.autograd.grad(c, list(leaves.values()), allow_unused=True)
                    for name, g in zip(total, gradients, strict=True):
                        if g is not None:  # the batch uses this parameter
                            total[name] += g
            total = added_up(self.ranks, "gradient", total)
            kinds = {name: (p.device, p.dtype) for name, p in self.params.items()}
            return {name: (self.reduction_factor * g).to(*kinds[name]) for name, g in total.items()}

    @contextmanager
    def together(
        self, where: str, settings: Mapping[str, Any] | None = None, vectors: Params | None = None
    ) -> Iterator[None]:
        """Context for a computation of all processes of the group: checks that they agree, and shares their errors.

        A single process does nothing.

        Args:
            where: Description of the computation, for messages.
            settings: Settings of the computation, by name: small values with a `repr`.
            vectors: Vectors to multiply with, by name.

        Raises:
            DistributedError: If models, losses, settings or vectors differ between processes. The message names it.
        """
        if not self.ranks.are_several:
            yield
            return
        module = self.model if isinstance(self.model, nn.Module) else nn.Module()
        with self.ranks.agreed(where), self.whole.held(self.params):
            self.check_model()
            # Those that are gathered layer by layer are the same in all processes.
            params = {name: self.whole.of(p) for name, p in self.params.items() if self.whole.has_values(p)}
            others = {
                n: self.whole.of(p)
                for n, p in module.named_parameters()
                if n not in params and self.whole.has_values(p)
            }
            buffers = {name: self.whole.of(b) for name, b in module.named_buffers()}
            modes = {n or "the model": "train" if m.training else "eval" for n, m in module.named_modules()}
            facts = {
                "Settings": Same(settings or {}, "Pass the same arguments in all processes."),
                "Losses": Same(self.loss.attributes(), "Pass the same loss in all processes."),
                "Modes of modules": Same(modes, "Call model.eval() in all processes."),
                "Parameters": Same(params | others, _COPY.format("p", "parameters")),
                "Buffers": Same(
                    buffers,
                    "Running statistics differ between processes if training has not synchronized them. "
                    + _COPY.format("b", "buffers"),
                ),
                "The vectors to multiply with": Same(
                    vectors or {}, "Broadcast vectors, or draw them from the same seed in all processes."
                ),
            }
            check_same(self.ranks, where, facts)
            yield

    def values(self) -> Params:
        """Return the detached values of the parameters, all in one dtype and on one device."""
        device, dtype = self.device, self.dtype
        return {name: p.detach().to(device, dtype) for name, p in self.params.items()}

    def leaves(self) -> Params:
        """Return the values of the parameters as leaves of a new computation graph."""
        return {name: p.requires_grad_() for name, p in self.values().items()}

    def predict(self, params: Params, batch: Batch, within: AbstractContextManager[Any] | None = None) -> Tensor:
        """Evaluate the model on a batch at the given parameters, and check the output.

        Args:
            params: Values of the parameters, by name, such as `leaves()`. If parameters have several dtypes or devices,
                each value is converted to those of its parameter.
            batch: A batch from `batches()`.
            within: A context that is active only while the model runs.

        Returns:
            Predictions `[N, ...]`: the model's output, its `logits` (as in Hugging Face), or the first of several
            outputs.
        """
        # Passes that are recorded as a CUDA graph were checked for random numbers before the recording.
        before = None if batch.recorded is not None else random_state(self.device)
        with evaluating(tensors_in(batch.x)), within or nullcontext():
            try:
                output = self._call(params, batch)()
            except IndexError:
                # Name the index, if it is one of an embedding.
                with CheckedEmbeddings(params, len(batch.y), batch.first):
                    self._call(params, batch)()
                raise
        if before is not None and not all(map(torch.equal, before, random_state(self.device))):
            # Repeat the call at `self.params`: autograd, `vmap` or a captured pass may track the given parameters.
            again = partial(self._without_graph, lambda: self._prediction_in(self._call(self.params, batch)()))
            with evaluating():
                self._unused_draws = check_draws(before, self._unused_draws, self.device, again)
        f = self._prediction_in(output).to(batch.y.device)
        if f.shape[:1] != batch.y.shape[:1]:
            raise DataError(
                f"The model returned shape {list(f.shape)} for targets of shape {list(batch.y.shape)}: not one "
                "prediction for each target.",
                "Put the batch axis first in both, or specify how to split a batch with unpack=.",
            )
        if self.flags is None:
            self.loss.check_now(f, batch.y)
        else:
            self.loss.check(f, batch.y)
            self.flags.note(self.loss.wrong(f, batch.y), batch.start)
        return f

    def _call(self, params: Params, batch: Batch) -> Callable[[], Any]:
        """Return a function without arguments that calls the model."""
        if params is not self.params and len(set(map(_kind_of, self.params.values()))) > 1:
            own = params | self.params
            params = {name: p.to(own[name].device, own[name].dtype) for name, p in params.items()}
        if not isinstance(self.model, nn.Module):
            return partial(self.model, params, batch.x)
        args, kwargs = arguments(batch.x, self.model)
        if params is self.params and self._are_own(self.model):
            return partial(self.model, *args, **kwargs)
        return partial(self._call_with, self.model, params, args, kwargs)

    def _call_with(self, model: nn.Module, params: Params, args: Any, kwargs: Any) -> Any:
        """Call the model with other parameters than its own."""
        with self._offloaded.left_alone(params) as given:
            return call_with(model, given, args, kwargs)

    def _are_own(self, model: nn.Module) -> bool:
        """Whether `params` are the model's own tensors. A loader may replace them from one batch to the next."""
        own = dict(model.named_parameters())
        return all(p is own.get(name) for name, p in self.params.items())

    def evaluate(self, batch: Batch) -> Tensor:
        """Evaluate the model on a batch at `self.params`, without recording a graph."""
        return self._without_graph(lambda: self.predict(self.params, batch))

    def _without_graph(self, run: Callable[[], Tensor]) -> Tensor:
        """Return predictions that are detached from any graph. None is recorded, unless the model needs one."""
        if not self._differentiates:
            try:
                with torch.no_grad():
                    return run()
            except RuntimeError as error:
                if "does not require grad" not in str(error):
                    raise
                self._differentiates = True
        with torch.enable_grad():
            return run().detach()

    def _prediction_in(self, output: Any) -> Tensor:
        """Return the prediction that the loss is for."""
        is_it = isinstance(output, Tensor) and self.loss.output is None
        return output if is_it else prediction_in(output, self.loss.output)

    def check_outputs(self, batch: Batch, unused: Sequence[str]) -> None:
        """Raise an error if parameters that predictions do not depend on are used by another output of the model.

        Nothing is raised if the loss names its output. Call it in the context `untouched(first_order=True)`.

        Args:
            batch: A batch.
            unused: Names of parameters that predictions do not depend on.

        Raises:
            ModelError: If another output depends on them.
        """
        if self.loss.output is not None:
            return
        output = self._call(self.params, batch)()
        f = prediction_in(output)
        params = [self.params[name] for name in unused]
        for place, t in output_tensors(output).items():
            if t is f or not t.requires_grad:
                continue
            found = torch.autograd.grad(t.sum(), params, retain_graph=True, allow_unused=True)
            names = [name for name, g in zip(unused, found, strict=True) if g is not None]
            if names:
                own = next(key for key, tensor in output_tensors(output).items() if tensor is f)
                raise ModelError(
                    f"The loss is for output {own!r} of the model, but only output {place!r} depends on "
                    f"{', '.join(map(repr, names[:5]))}: their curvature would be zero. The model returned "
                    f"{_listed(output_tensors(output))}.",
                    f"Name the output that the loss is for: kfs.losses.describe(loss, output={own!r}). Or leave "
                    "parameters of other outputs out with params=, and make another EmpiricalRisk for each output.",
                )

    def finite(self, f: Tensor, batch: Batch) -> None:
        """Raise an error, or set a flag, if predictions are NaN or positive infinity (negative infinity is a mask)."""
        if self.flags is not None:
            self.flags.note(not_finite(f), batch.start)
        elif f.numel() and not f.amax().isfinite() and len(bad := not_finite(f).nonzero()):
            raise DataError(
                f"The prediction for example {batch.first + int(bad[0, 0])} is not finite.",
                "Look for NaN or infinity in the data or the parameters.",
            )

    @contextmanager
    def checking_later(self, own: DeferredChecks | None = None) -> Iterator[Callable[[], None]]:
        """Defer checks of values on an accelerator in this context, so that passes do not synchronize.

        Args:
            own: The flags to set. If not given, new flags are created on an accelerator.

        Yields:
            A function that reads the flags. It raises the error of an example that failed a check.

        Raises:
            KfsError: When flags are read, if an example has failed a check.
        """
        outer = self.flags  # a hook of the model may compute something with the same risk
        self.flags = flags = own or (DeferredChecks(self.device) if sync.is_asynchronous(self.device) else None)

        def check() -> None:
            example = None if flags is None else flags.first_failure()
            if example is not None:
                self.flags = None
                self._explain(example)

        try:
            yield check
        finally:
            self.flags = outer

    def _explain(self, example: int) -> NoReturn:
        """Raise the error of an example that failed a deferred check, by evaluating its batch again."""
        for batch in self.batches():
            if batch.first <= example < batch.first + len(batch.y):
                self.finite(self.evaluate(batch), batch)
        raise DataError(
            f"The prediction or the target of example {example} failed a check, but passed it when evaluated again.",
            "Pass data that give the same values every time, and a model that returns the same predictions.",
        )

    def batches(self, task: str = "", start: int | None = None) -> Iterator[Batch]:
        """Iterate over the non-empty batches on the parameters' device, and check that they are the same in every pass.

        A loader that shuffles yields the same order every time. An error is raised if counts or the first batch change.
        With several processes, the batches of this process are returned, with their indices among all data.

        Args:
            task: Name of the computation, to show its progress. By default, none is shown.
            start: Index of the first example. By default, its index among all data, which may have to be counted first.
        """
        checks, device, several = self._same_data, self.device, self.ranks.are_several
        with_passes = start is None
        input_device, gpus = self._devices()
        if start is None:
            if checks.start is None:  # it depends on the counts of other processes
                self.count()
            start = checks.start or 0
        data: Iterable[Any] = repeatably(self._data)
        if task:
            data = tracked(data, task, self.num_batches, self.progress, "batch")
        num_data = 0
        count: float | Tensor = 0  # an integer, so that counts of integers on a device stay exact
        seen: Fingerprint | None = None
        for raw in data:
            if several:
                self.ranks.listen()
            x, y = unpacked(self._unpack, raw)
            if len(y) == 0:
                continue
            if seen is None:
                seen = fingerprint(x, y)  # before the move: data on a CPU need no synchronization
                checks.check_first_batch(seen)
                self.loss.check_inputs(x, y)
            targets = to_device(y, device)
            batch = Batch(to_device(x, input_device), targets, start + num_data, self.loss.count(targets))
            copies = last_copies(x, y, gpus) if gpus else []
            yield batch
            for copy in copies:  # pragma: no cover (tested on a GPU)
                copy.synchronize()  # a loader may use its pinned memory again
            num_data += len(y)
            count = count + batch.counted
        checks.check_count(num_data, count, seen)
        if with_passes and self.whole.layers is not None:
            self.whole.layers.finish()

    def _devices(self) -> tuple[torch.device, list[torch.device]]:
        """Return the device of inputs, and all GPUs among the devices of data.

        Inputs are where the model's first parameter is, which may be none of those that are considered.
        """
        every = self.model.parameters() if isinstance(self.model, nn.Module) else ()
        found = next((p.device for p in every if not p.is_meta), self.device)
        return found, [device for device in {found, self.device} if device.type == "cuda"]

    def count(self) -> tuple[int, float]:
        """Return the number of examples and the divisor of a mean over them, counted in a first pass if necessary.

        Call it before a loop over batches that needs the result: not every loader supports two iterators at a time.
        """
        if self._same_data.counted_by_all is not None:
            return self._same_data.counted_by_all
        with self.ranks.agreed("counting"):
            if self._same_data.counted is None:
                for batch in self.batches("counting", start=0):
                    if self._same_data.extrapolate(batch):
                        break
        return self._same_data.count_all()

    def check_model(self) -> None:
        """Raise an error if a prediction for one example would be random or depend on other examples."""
        if self._needs_values and any(p.is_meta for p in self.params.values()):
            raise ModelError(
                "The parameters are on the meta device, where tensors have shapes but no values.",
                "Move the model to another device, or estimate the cost of KFAC with kfs.inspect(model, sample).",
            )
        if isinstance(self.model, nn.Module):
            check_module(self.model)

    @contextmanager
    def untouched(self, first_order: bool = False) -> Iterator[None]:
        """Context for running the model: restores random state and buffers, and makes all derivatives exist.

        Args:
            first_order: Whether the model is run at `params`, for plain gradients with respect to its activations. Then
                no operation needs a replacement, and all of `params` require gradients in this context: otherwise a
                frozen parameter could not be distinguished from a tensor that was detached from it.

        Raises:
            ModelError: If dropout or BatchNorm is in training mode, or if the model changed a buffer.
        """
        self.check_model()
        check_no_inference_mode()
        model, given = self.model, self.params
        is_sharded = self.whole.is_distributed(given)
        self._unused_draws = None  # the model may have changed since the last check
        try:
            with ExitStack() as stack:
                if is_sharded:
                    self.params = stack.enter_context(self.whole.in_place(given, first_order))
                stack.enter_context(restored(model, self.device))
                has_own = isinstance(model, nn.Module) and self._are_own(model)
                frozen = [p for p in self.params.values() if not p.requires_grad]
                # A checkpoint reruns a module during the backward pass, with the same operations, but with the module's
                # own parameters.
                if isinstance(model, nn.Module) and not (has_own and (first_order or not frozen)):
                    stack.enter_context(no_hooks_on_saved_tensors())
                if not first_order:
                    # The faster attention kernels have no second and no forward-mode derivatives.
                    stack.enter_context(sdpa_kernel(SDPBackend.MATH))
                    stack.enter_context(ExactDerivatives())
                elif not has_own:
                    self.params = self._leaves = leaves_of(self.params, self._leaves)
                elif frozen:
                    stack.enter_context(switched_on(frozen))
                yield
        finally:
            self.params = given
            if is_sharded:  # drop all references to gathered tensors
                self._leaves = {}


def output_tensors(output: Any) -> dict[str | int, Tensor]:
    """Return the tensors in a model's output, by key, attribute or index; a tensor alone has the index 0."""
    if isinstance(output, Tensor):
        return {0: output}
    if is_named_tuple(output):
        output = output._asdict()
    elif not isinstance(output, (tuple, list, Mapping)):
        output = getattr(output, "__dict__", {})
    items = output.items() if isinstance(output, Mapping) else enumerate(output)
    return {name: t for name, t in items if isinstance(t, Tensor)}


def prediction_in(output: Any, name: str | int | None = None) -> Tensor:
    """Return the predictions in a model's output: its `logits`, or the first tensor that has an axis.

    Args:
        output: The output of a model: a tensor, an object or mapping with `logits`, or a tuple or list that starts with
            the prediction. Scalar tensors before the prediction, such as a loss, are skipped.
        name: The key, attribute or index of the prediction, if the loss names one (`Loss.output`).

    Raises:
        ModelError: If there is no such tensor, or if an unordered output has several of them.
    """
    several = output_tensors(output)
    if name is not None:
        named = several.get(name, getattr(output, name, None) if isinstance(name, str) else None)
        if isinstance(named, Tensor):
            return named
        raise ModelError(
            f"The loss is for output {name!r} of the model, which returned a {type(output).__name__} with "
            f"{_listed(several)}.",
            "Name one of these: kfs.losses.describe(loss, output=...).",
        )
    named = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(named, Tensor):
        return named
    found = {place: t for place, t in several.items() if t.ndim > 0}
    ordered = isinstance(output, (Tensor, tuple, list))
    if not found or (len(found) > 1 and not ordered):
        listed = f": {_listed(found)}" if found else ""
        raise ModelError(
            f"The model returned a {type(output).__name__} with {len(found)} tensors that have a batch axis, none of "
            f"them called `logits`{listed}.",
            "Return a tensor, an object or mapping with `logits`, or a tuple that starts with the prediction. Or name "
            "the prediction: kfs.losses.describe(loss, output=...). A Hugging Face model without logits needs a head, "
            "such as AutoModelForCausalLM.",
        )
    return next(iter(found.values()))


def _listed(outputs: Mapping[str | int, Tensor]) -> str:
    """Return the names and shapes of outputs for a message."""
    return ", ".join(f"{name!r} {list(t.shape)}" for name, t in outputs.items()) or "no tensors"


def check_risk(risk: object) -> None:
    """Check that the argument is an `EmpiricalRisk`.

    Raises:
        DtypeError: If it has another type, such as a model.
    """
    if isinstance(risk, EmpiricalRisk):
        return
    way_out = "Pass kfs.EmpiricalRisk(model, loss, data)."
    if isinstance(risk, nn.Module):
        way_out += " The optimizer, which takes a model and its loss, is kfs.optim.KFAC."
    raise DtypeError(f"The risk is a {type(risk).__name__}.", way_out)
