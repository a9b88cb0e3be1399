"""One-line mistakes in `kfs`, each of which some test must notice.

A mutant is a fragment of a line and its replacement. All mutants change results, messages or limits, not only speed.
The fragment identifies the line: if its file was moved, all files of `kfs` are searched.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Mutant:
    """A one-line mistake.

    Attributes:
        room: Its part of `kfs`.
        file: The expected file, relative to `kfs/`.
        old: A fragment of a line that occurs once in the file, or once after `near`.
        new: The replacement.
        error: The kind of mistake.
        tests: Files and folders of `tests/` that are most likely to notice it.
        near: A text that occurs once in the file, if the fragment occurs several times. The first one after it is used.
        name: The room and a number.
    """

    room: str
    file: str
    old: str
    new: str
    error: str
    tests: tuple[str, ...]
    near: str = ""
    name: str = ""

    def apply(self, root: Path = ROOT) -> tuple[Path, str]:
        """Return the file and its text with the mistake, without writing it.

        Raises:
            ValueError: If the fragment is not found exactly once.
        """
        expected = root / "kfs" / self.file
        candidates = [expected] if expected.is_file() and self._count(expected) == 1 else _sources(root)
        found = [path for path in candidates for _ in range(self._count(path))]
        if len(found) != 1:
            raise ValueError(
                f"Mutant {self.name} ({self.error}): {self.old!r} occurs {len(found)} times in kfs, expected once. "
                "If the line was rewritten, rewrite the mutant in tests/mutants/mutants.py; if it was removed, "
                "replace the mutant by another one."
            )
        text = found[0].read_text(encoding="utf-8")
        start = text.index(self.old, text.index(self.near))
        return found[0], text[:start] + self.new + text[start + len(self.old) :]

    def _count(self, path: Path) -> int:
        """Return the number of matches in a file; with `near`, only the first match after it counts."""
        text = path.read_text(encoding="utf-8")
        if not self.near:
            return text.count(self.old)
        return text.count(self.near) * (self.old in text.partition(self.near)[2])


def _sources(root: Path) -> list[Path]:
    return sorted((root / "kfs").rglob("*.py"))


@dataclass(frozen=True)
class _Room:
    """Collects the mutants of a part of `kfs`."""

    name: str
    tests: tuple[str, ...]  # for mutants without own tests

    def mutant(self, file: str, old: str, new: str, error: str, tests: Sequence[str] = (), near: str = "") -> Mutant:
        return Mutant(self.name, file, old, new, error, tuple(tests) or self.tests, near)


def _numbered(mutants: Sequence[Mutant]) -> Iterator[Mutant]:
    """Name mutants by their room and a number."""
    seen: Counter[str] = Counter()
    for one in mutants:
        seen[one.room] += 1
        name = f"{one.room.replace(' ', '-')}-{seen[one.room]}"
        yield Mutant(one.room, one.file, one.old, one.new, one.error, one.tests, one.near, name)


basics = _Room("basics", ("tests/basics",)).mutant
losses = _Room("losses", ("tests/losses",)).mutant
data = _Room(
    "risk and data", ("tests/problem/test_risk.py", "tests/problem/test_data.py", "tests/problem/test_outputs.py")
).mutant
operators = _Room("operators", ("tests/operators/test_operators.py", "tests/operators/test_algorithms.py")).mutant
rules = _Room("factors rules", ("tests/factors/test_rules.py", "tests/factors/test_operations.py")).mutant
capture = _Room("factors capture", ("tests/factors/test_ownership.py", "tests/factors/test_audit.py")).mutant
sums = _Room("factors accumulate", ("tests/factors/test_definition.py", "tests/factors/test_kfac.py")).mutant
structures = _Room("factors blocks", ("tests/factors/test_kronecker.py", "tests/factors/test_kronecker_sum.py")).mutant
kfac = _Room("factors", ("tests/factors/test_kfac.py", "tests/factors/test_ekfac.py")).mutant
recording = _Room("runtime", ("tests/operators/test_recorded_changes.py",)).mutant
optim = _Room("optim", ("tests/optim/test_update_rule.py", "tests/optim/test_trajectory.py")).mutant
influence = _Room("influence", ("tests/influence",)).mutant
laplace = _Room("laplace", ("tests/laplace",)).mutant
merging = _Room("merging", ("tests/merging",)).mutant
compress = _Room("compress", ("tests/compress",)).mutant
distributed = _Room("distributed", ("tests/distributed/test_placement.py", "tests/distributed/test_summing.py")).mutant
pinn = _Room("pinn", ("tests/pinn",)).mutant
storage = _Room("files", ("tests/test_files.py", "tests/factors/test_files.py")).mutant
conformance = _Room("conformance", ("tests/conformance",)).mutant

_MUTANTS = [
    # The definitions.
    basics(
        "basics/emp_fishers.py",
        "return R * E",
        "return E",
        "wrong scale: reduction factor missing",
    ),
    basics("basics/exact_fishers.py", "* sqrt(dim):", "* dim:", "wrong scale: labels too far from the prediction"),
    basics("basics/exact_fishers.py", "F1 += weight * tensordot", "F1 += tensordot", "missing weights of labels"),
    basics(
        "basics/mc_fishers.py",
        "return R / mc_samples * F",
        "return R * F",
        "wrong scale: sum instead of mean over draws",
    ),
    basics(
        "basics/mc_fisher_product.py",
        "u += g1 * (g2 * v.detach()).sum()",
        "u += g2 * (g1 * v.detach()).sum()",
        "swapped sides of an outer product",
    ),
    basics("basics/ggns.py", "(J1.T @ H @ J2)", "(J1.T @ H.T @ J1)", "wrong Jacobian of columns"),
    basics(
        "basics/flattening.py",
        "return vec(vec(t, 0, row_ndim - 1), 1, -1)",
        "return rvec(vec(t, 0, row_ndim - 1), 1, -1)",
        "columns flattened in another order than rows",
    ),
    basics("basics/hessians.py", "mixed_hvp(c, a2, a1, one_hot)", "mixed_hvp(c, a1, a2, one_hot)", "swapped arguments"),
    basics(
        "basics/reduction_factors.py",
        'return 2.0 if loss.reduction == "sum" else 2.0 / target.numel()',
        'return 2.0 if loss.reduction == "sum" else 2.0 / len(target)',
        "mean over data instead of entries",
    ),
    basics(
        "basics/reduction_factors.py",
        "return target.numel() / target.shape[1]",
        "return target.shape[0]",
        "positions of probabilities not counted",
    ),
    basics(
        "basics/label_sampling.py",
        "return torch.where(target == loss.ignore_index, target, label)",
        "return label",
        "ignored labels drawn like others",
    ),
    # Losses.
    losses(
        "losses/binary.py",
        "return root(self._mass(f, y)) * (probability - label)",
        "return self._mass(f, y) * (probability - label)",
        "weight instead of its root",
    ),
    losses(
        "losses/binary.py",
        "return self._mass(f, y) * f.sigmoid() - self._yes(f, y)",
        "return f.sigmoid() - self._yes(f, y)",
        "missing weights",
    ),
    losses(
        "losses/binary.py",
        "return (2 * y.to(f.dtype) - 1).expand_as(f)",
        "return (1 - 2 * y.to(f.dtype)).expand_as(f)",
        "sign of the margin",
    ),
    losses(
        "losses/cross_entropy.py",
        "product.sum(axis, keepdim=True), value=-1)",
        "product.sum(axis, keepdim=True), value=1)",
        "sign in the covariance of labels",
    ),
    losses(
        "losses/cross_entropy.py", "reached = u * cumulative[..., -1:]", "reached = u", "draws not scaled to the total"
    ),
    losses(
        "losses/draws.py",
        "first // at_a_time, first + num_data",
        "first // at_a_time, num_data",
        "off by the first example",
    ),
    losses(
        "losses/draws.py",
        "torch.sqrt(-2 * torch.log(radius))",
        "torch.sqrt(-torch.log(radius))",
        "variance of normal draws",
    ),
    losses(
        "losses/cross_entropy.py",
        "expected = f.shape[:1] + f.shape[2:] if labels else f.shape",
        "expected = f.shape[:2] + f.shape[2:] if labels else f.shape",
        "wrong expected shape",
    ),
    losses(
        "losses/cross_entropy.py",
        "values *= root_of_mass[:, :, p]",
        "values *= root_of_mass[:, :, p] ** 2",
        "weight instead of its root",
    ),
    losses(
        "losses/cross_entropy.py",
        "p = (1 - self.label_smoothing) * p + self.label_smoothing / f.shape[1]",
        "p = (1 - self.label_smoothing) * p",
        "smoothing of labels half missing",
    ),
    losses(
        "losses/cross_entropy.py",
        "y = y[:, 1:] if self.shift else y",
        "y = y[:, :-1] if self.shift else y",
        "off by one: labels not shifted",
    ),
    losses("losses/gaussian.py", "r**2 / var**3 - 0.5 / var**2", "r**2 / var**3 + 0.5 / var**2", "sign"),
    losses("losses/gaussian.py", "+ v.sqrt() * noise)", "+ v * noise)", "variance instead of standard deviation"),
    losses("losses/huber.py", "scale = 1 / self.delta", "scale = self.delta", "inverted scale"),
    losses(
        "losses/poisson.py",
        "return self.second_derivative(f, self._rate(f)) * v",
        "return self.second_derivative(f, y) * v",
        "targets instead of expected targets",
    ),
    losses(
        "losses/custom.py",
        "Q * eigenvalues.clamp(min=0).sqrt().unsqueeze(1)",
        "Q * eigenvalues.clamp(min=0).unsqueeze(1)",
        "missing root",
    ),
    losses(
        "losses/cross_entropy.py",
        "count = (labels != 0).any(1).sum()",
        "count = (labels == labels).any(1).sum()",
        "positions without probabilities counted",
    ),
    losses(
        "losses/cross_entropy.py",
        "smoothing = classes * (mean_sigma - mean_g / slope)",
        "smoothing = mean_sigma - mean_g / slope",
        "number of classes missing in the smoothing",
    ),
    losses("losses/divergence.py", "kl_div(f.log_softmax(-1), y", "kl_div(f, y", "criterion without curvature"),
    losses(
        "losses/divergence.py",
        "return y.numel() if self.over_entries else len(y)",
        "return y.numel() if not self.over_entries else len(y)",
        "mean over entries instead of examples",
    ),
    losses(
        "losses/preference.py",
        "return self.beta * stack([derivative, -derivative], 1)",
        "return stack([derivative, -derivative], 1)",
        "missing scale of a gradient",
    ),
    losses("losses/preference.py", "- f[:, 1] - y.to(", "- f[:, 1] + y.to(", "sign of the margin"),
    # Risk, data and outputs.
    data("problem/risk.py", "return {name: (self.reduction_factor * g)", "return {name: g", "missing reduction factor"),
    data("problem/risk.py", "return self.reduction_factor * total", "return total", "missing reduction factor"),
    data(
        "problem/risk.py",
        "self.params.values()))) > 1:",
        "self.params.values()))) > 9:",
        "values in another dtype than their parameters",
        ("tests/problem/test_kinds.py",),
    ),
    data(
        "problem/offloaded.py",
        "hook.offload = False",
        "hook.offload = True",
        "hooks replace the considered parameters",
        ("tests/problem/test_kinds.py",),
    ),
    data(
        "operators/space.py",
        "columns = self.like_own(columns)",
        "columns = dict(columns)",
        "results in another dtype than parameters",
        ("tests/problem/test_kinds.py",),
    ),
    rules(
        "factors/rules/fallback.py",
        "(parameter.derived is not None or may_be_expanded)",
        "(parameter.derived is not None and run.seen.num_data == 1 or may_be_expanded)",
        "constants count as data in a batch of one",
        ("tests/factors/test_single_datum.py",),
    ),
    capture(
        "factors/audit/audit.py",
        "tolerance = max(tolerance, precisions.tolerance(f.dtype, f.device))",
        "tolerance = 1 * tolerance",
        "the precision of frozen parts is ignored",
        ("tests/problem/test_kinds.py",),
    ),
    rules(
        "factors/rules/embedding.py",
        "OTHERS if row == padding else row",
        "row",
        "positions with the padding index count",
        ("tests/factors/test_constants.py",),
    ),
    data(
        "problem/risk.py",
        "num_data += len(y)",
        "num_data += 1",
        "wrong index of the first example of a batch",
        ("tests/problem/test_risk.py", "tests/problem/test_random_models.py"),
    ),
    data(
        "problem/data.py",
        "position += 1",
        "position += 0",
        "every batch drawn with the same seed",
        ("tests/problem/test_data.py",),
    ),
    data(
        "problem/data.py",
        "preferred = [axis for axis in (batch_axis, 0) if axis in axes]",
        "preferred = [axis for axis in (0, batch_axis) if axis in axes]",
        "wrong preference of axes",
        ("tests/problem/test_data.py", "tests/factors/test_positions.py", "tests/factors/test_audits.py"),
    ),
    data(
        "problem/data.py",
        'rest = {key: value for key, value in batch.items() if key != "labels"}',
        "rest = dict(batch)",
        "labels passed to the model",
        ("tests/problem/test_data.py", "tests/problem/test_inputs.py"),
    ),
    data(
        "problem/data.py",
        "return not any(few <= number < num_data for number in largest)",
        "return True",
        "condition dropped: indices into a batch that is cut",
        ("tests/problem/test_data.py", "tests/operators/test_one_derivative.py"),
    ),
    data(
        "problem/data.py",
        "torch.arange(_SAMPLE, device=device) * shape.numel() // _SAMPLE",
        "torch.arange(_SAMPLE, device=device)",
        "a sample of the first numbers only",
        ("tests/problem/test_data.py", "tests/problem/test_num_data.py", "tests/problem/test_inputs.py"),
    ),
    data(
        "problem/risk.py",
        "found = {place: t for place, t in several.items() if t.ndim > 0}",
        "found = several",
        "a loss taken for predictions",
        ("tests/problem/test_outputs.py",),
    ),
    data(
        "problem/risk.py",
        "if t is f or not t.requires_grad:",
        "if t is not f or not t.requires_grad:",
        "other outputs not searched for parameters",
        ("tests/problem/test_outputs.py",),
    ),
    # Operators.
    operators(
        "operators/curvature.py",
        "u[:, n] = S[start : start + self.chunk_size, n]",
        "u[:, n] = S[start : start + self.chunk_size, 0]",
        "wrong example",
    ),
    operators(
        "operators/curvature.py",
        "return gradients.div(self.mc_samples**0.5)",
        "return gradients.div(self.mc_samples)",
        "wrong scale of draws",
        ("tests/operators/test_operators.py", "tests/problem/test_random_models.py"),
    ),
    operators(
        "operators/curvature.py",
        "wanted = [name for name in names if name in rows]",
        "wanted = rows",
        "blocks coupled that are not",
    ),
    operators(
        "operators/curvature.py",
        "batch.y[some], batch.first + some.start",
        "batch.y[some], batch.first",
        "draws of the first example",
        ("tests/operators/test_many_columns.py", "tests/operators/test_memory_of_products.py"),
    ),
    operators(
        "operators/estimate.py",
        "return samples.std(-1).div(samples.shape[-1] ** 0.5)",
        "return samples.std(-1)",
        "deviation instead of standard error",
        ("tests/operators/test_estimators.py",),
    ),
    operators(
        "operators/estimate.py",
        "samples = H.trace() - (S * (H @ S)).sum(0) + (X * AX).sum(0)",
        "samples = H.trace() + (X * AX).sum(0)",
        "biased estimate",
        ("tests/operators/test_estimators.py",),
    ),
    operators(
        "operators/estimate.py",
        "Z = _product(A.T, Q, line) / size",
        "Z = _product(A, Q, line) / size",
        "missing transpose",
        ("tests/operators/test_estimators.py",),
    ),
    operators(
        "operators/solve.py",
        "return torch.where(B.abs().amax(0) > 0, X / size, 0.0)",
        "return torch.where(B.abs().amax(0) > 0, X, 0.0)",
        "start not scaled",
        ("tests/operators/test_solvers.py",),
    ),
    operators(
        "operators/solve.py",
        "limit = _ITERATIONS_PER_ROW * A.shape[0] if max_iterations is None else max_iterations",
        "limit = _ITERATIONS_PER_ROW * A.shape[0]",
        "limit of iterations ignored",
        ("tests/operators/test_solvers.py",),
    ),
    operators(
        "operators/solve.py", "X = X + scale * Z", "X = X + Z", "missing scale", ("tests/operators/test_solvers.py",)
    ),
    operators(
        "operators/solve.py",
        "state = _State(A, B, damping**0.5)",
        "state = _State(A, B, damping)",
        "damping instead of its root",
        ("tests/operators/test_solvers.py",),
    ),
    operators(
        "operators/estimate.py",
        "return nodes, vectors[0] ** 2",
        "return nodes, vectors[:, 0] ** 2",
        "swapped axes of eigenvectors",
    ),
    operators(
        "operators/estimate.py", "torch.cat(weights) / num_vectors", "torch.cat(weights)", "weights do not sum to one"
    ),
    operators(
        "operators/estimate.py",
        'which = ("L" if largest else "S")',
        'which = ("S" if largest else "L")',
        "smallest for largest",
    ),
    operators(
        "operators/space.py",
        "return self.unflatten(flat.index_add_(1, places, entries))",
        "return self.unflatten(flat.index_copy_(1, places, entries))",
        "repeated entries not added up",
    ),
    # Rules: which rows a layer multiplies.
    rules(
        "factors/rules/linear.py",
        'return multiply(call, "matmul", a, b, flip=True)',
        'return multiply(call, "matmul", a, b)',
        "missing transpose of the weight",
    ),
    rules("factors/rules/linear.py", "if beta != 1 or alpha != 1 or", "if", "condition dropped: scaled products"),
    rules(
        "factors/rules/linear.py",
        "axes = w[::-1] if view.transposed else w",
        "axes = w",
        "transposed views",
        ("tests/factors/test_rows.py",),
    ),
    rules(
        "factors/rules/linear.py",
        "joins = view.is_whole if whole else same_rows",
        "joins = True",
        "part of a bias joined to a weight",
    ),
    rules(
        "factors/rules/convolution.py",
        "around = tuple((total // 2, total - total // 2) for total in totals)",
        "around = tuple((total - total // 2, total // 2) for total in totals)",
        "padding on the wrong side",
        ("tests/factors/test_definition.py",),
    ),
    rules(
        "factors/rules/convolution.py",
        "(d * (k - 1) - p + more, d * (k - 1) - p)",
        "(d * (k - 1) - p, d * (k - 1) - p)",
        "missing output padding",
    ),
    rules(
        "factors/rules/convolution.py",
        "return sparse.flip(*range(2, dims + 2))",
        "return sparse",
        "kernel not mirrored",
    ),
    rules(
        "factors/rules/normalization.py",
        '"channels": (x.shape[0], prod(x.shape[2:])) if x.ndim > 2 else x.shape[:1]',
        '"channels": (x.shape[0], 1) if x.ndim > 2 else x.shape[:1]',
        "positions missing",
        ("tests/factors/test_normalization.py", "tests/factors/test_definition.py", "tests/factors/test_kfac.py"),
    ),
    rules(
        "factors/rules/normalization.py",
        "statistics = () if training else (running_mean, running_var)",
        "statistics = ()",
        "statistics of the batch for running ones",
        ("tests/factors/test_normalization.py", "tests/factors/test_rules.py"),
    ),
    rules(
        "factors/rules/normalization.py",
        "lambda x: x.clamp(max=0), along)",
        "lambda x: x.clamp(min=0), along)",
        "min for max in PReLU",
    ),
    rules(
        "factors/rules/embedding.py",
        "padding = None if padding_idx is None else padding_idx % weight.shape[0]",
        "padding = None",
        "padding counted",
    ),
    rules(
        "factors/rules/experts.py",
        "z = z if alpha == beta else alpha / beta * z",
        "z = z if alpha == beta else alpha * z",
        "wrong scale",
        ("tests/factors/test_mixtures.py",),
    ),
    # Capture: the example of each row, and which rows count.
    capture(
        "factors/rows/counted.py",
        "(T.flip(1).cumsum(1) > 0).flip(1)",
        "(T.cumsum(1) > 0)",
        "rows after instead of before a target",
        ("tests/factors/test_padded_rows.py", "tests/factors/test_rows.py"),
    ),
    capture(
        "factors/rows/counted.py",
        "several = M.sum(1, keepdim=True) > 1",
        "several = M.sum(1, keepdim=True) > 0",
        "off by one: data of a single row",
        ("tests/factors/test_padded_rows.py", "tests/factors/test_rows.py"),
    ),
    capture(
        "factors/rows/measure.py",
        "found: Tensor = (size > 0) & (rest",
        "found: Tensor = (rest",
        "condition dropped: rows without gradient count",
        ("tests/factors/test_padded_rows.py",),
    ),
    capture(
        "factors/rows/measure.py",
        "min(_TIMES_VARIATION * varies, _MOST_VARIATION)",
        "_MOST_VARIATION * varies",
        "gradients that vary taken for a mixture",
        ("tests/factors/test_audit.py",),
    ),
    capture(
        "factors/audit/audit.py",
        "self.passes.callback(one.forget)",
        "self.passes.callback(len, [])",
        "graphs of refused batches kept",
        ("tests/factors/test_audit.py",),
    ),
    capture(
        "factors/audit/row_experiments.py",
        "(other.rows[0] & ~rows).any()",
        "(other.rows[0] ^ rows).any()",
        "positions that hold for shifted inputs only if no value is off",
        ("tests/factors/test_composites.py",),
    ),
    capture(
        "factors/audit/row_experiments.py",
        "turn + 1 >= _FEWEST and not unexplained and not any(",
        "turn + 1 >= _FEWEST and not any(",
        "rows that values switch off in few repetitions do not count",
        ("tests/factors/test_composites.py",),
    ),
    capture(
        "factors/rows/measure.py",
        "torch.equal(voters // inner % num_data, row_map[voters])",
        "torch.equal(voters // inner, row_map[voters])",
        "missing modulus",
    ),
    capture(
        "factors/rows/measure.py",
        "misfit[row_map >= num_data] = torch.inf",
        "misfit[owners > num_data] = torch.inf",
        "off by one",
    ),
    capture(
        "factors/rows/measure.py",
        "while digits == 0 or BASE**digits < num_data:",
        "while digits == 0 or BASE ** (digits + 1) < num_data:",
        "too few digits for many examples",
    ),
    capture(
        "factors/rows/measure.py",
        "misfit = torch.maximum(misfit, distance.nan_to_num(nan=0.0))",
        "misfit = torch.minimum(misfit, distance.nan_to_num(nan=0.0))",
        "min for max",
    ),
    capture(
        "factors/capture.py",
        "for derived in reversed(self.derived):",
        "for derived in self.derived:",
        "derived parameters in the wrong order",
        ("tests/factors/test_composites.py", "tests/factors/test_gradient_streams.py"),
    ),
    capture(
        "factors/trace/tracking.py",
        "torch.stack(self._arrived).sum(0)",
        "torch.stack(self._arrived).mean(0)",
        "mean for sum of gradients",
        ("tests/factors/test_composites.py", "tests/factors/test_gradient_streams.py"),
    ),
    capture(
        "factors/trace/tracking.py",
        "self.stop = self.start + (reach + 1) * t.element_size()",
        "self.stop = self.start + reach * t.element_size()",
        "off by one: last number of a parameter",
        ("tests/factors/test_rows.py", "tests/factors/test_composites.py"),
    ),
    capture(
        "factors/trace/derived.py",
        "strides = tuple(0 if n == 1 else stride for n, stride in zip(padded, strides, strict=True))",
        "strides = tuple(strides)",
        "axes of length one that are expanded",
        ("tests/factors/test_composites.py", "tests/factors/test_constants.py"),
    ),
    capture(
        "factors/trace/derived.py",
        "pack(before.get((z.data_ptr(), z.shape, z.stride()), z))",
        "pack(z)",
        "expanded parameters in checkpoints, which save others when they run again",
        ("tests/optim/test_integration.py",),
    ),
    # Sums: both factors.
    sums(
        "factors/accumulate/factor_sums.py",
        "averages = collected.gradients / collected.counts.clamp(min=1).unsqueeze(-1)",
        "averages = collected.gradients",
        "sum instead of mean over positions",
    ),
    sums(
        "factors/accumulate/factor_sums.py",
        "last = counts if plan.ones else torch.zeros_like(counts)",
        "last = torch.ones_like(counts)",
        "bias counted once instead of at every position",
    ),
    sums(
        "factors/accumulate/block_sums.py",
        'scale = ratio.sqrt() if side == "A" else ratio.rsqrt()',
        "scale = ratio.sqrt()",
        "inverted scale of the second factor",
        (
            "tests/factors/test_sparse_and_nested.py",
            "tests/factors/test_repeated_tables.py",
            "tests/factors/test_traps.py",
            "tests/factors/test_mixtures.py",
        ),
    ),
    sums(
        "factors/accumulate/block_sums.py",
        "return sum(role.inverse_squares for role in self.roles.values()) / self.terms",
        "return sum(role.inverse_squares for role in self.roles.values())",
        "missing mean",
        ("tests/factors/test_forward_only.py",),
    ),
    sums(
        "factors/accumulate/block_sums.py",
        "return sum(role.positions**2 / role.counted",
        "return sum(role.positions / role.counted",
        "missing square of positions",
        ("tests/optim/test_update_rule.py",),
    ),
    sums(
        "factors/accumulate/statistic.py",
        "statistic.add_counts({place: -number for place, number in statistic.counts().items()})",
        "pass",
        "counts are not reset",
        ("tests/factors/test_statistic.py", "tests/laplace/test_backend.py"),
    ),
    sums(
        "factors/accumulate/statistic.py",
        "self.add_counts({place: sum(one[place] for one in every) - number for place, number in mine.items()})",
        "pass",
        "counts are not added up over ranks",
        ("tests/distributed/test_factors.py",),
    ),
    sums(
        "factors/accumulate/statistic.py",
        "for one in receivers:",
        "for one in receivers[:1]:",
        "gradients reach only the first of several statistics",
        ("tests/factors/test_statistic.py",),
    ),
    sums(
        "factors/accumulate/statistic.py",
        "if symmetric and owner in {None, ranks.rank}:",
        "if not symmetric:",
        "lower triangle is not summed over ranks",
        ("tests/distributed/test_factors.py",),
    ),
    sums(
        "factors/accumulate/outer_products.py",
        "self.ones += len(x)",
        "self.ones += 1",
        "bias counted once",
        near="self.inner.addmm_(transposed, x)",
    ),
    sums(
        "factors/accumulate/outer_products.py",
        "self.total[..., -1, :-1] = self._last_column",
        "pass",
        "bias row missing",
    ),
    sums(
        "factors/accumulate/inputs.py",
        "gradients = gradients if Q_B is None else Q_B[0].T @ gradients",
        "gradients = gradients if Q_B is None else Q_B[0] @ gradients",
        "missing transpose",
        ("tests/factors/test_ekfac.py",),
    ),
    sums(
        "factors/accumulate/inputs.py",
        "total[:, -1] += weights.sum(0)",
        "total[:, -1] += 1",
        "wrong squares of a bias",
        ("tests/factors/test_ekfac.py",),
    ),
    sums(
        "factors/accumulate/inputs.py",
        "return index != self.padding",
        "return index == self.padding",
        "negated condition",
        ("tests/factors/test_padding.py",),
    ),
    sums(
        "factors/accumulate/patches.py",
        "(n + sum(pad) - d * (k - 1) - 1) // s + 1",
        "(n + sum(pad) - d * (k - 1)) // s",
        "off by one: number of patches",
    ),
    sums(
        "factors/accumulate/patches.py",
        "row_map.counts(len(x), sums) * prod(self.out)",
        "row_map.counts(len(x), sums)",
        "positions of images not counted",
    ),
    sums(
        "factors/accumulate/patches.py",
        "return positions.flip(1) if self.mirrored else positions",
        "return positions",
        "patches of mirrored images in the wrong order",
        ("tests/factors/test_ekfac.py", "tests/factors/test_padded_rows.py"),
    ),
    sums(
        "factors/accumulate/patches.py",
        "yield max(first + count, 0), rows",
        "yield first + count, rows",
        "negative start of a range",
        ("tests/factors/test_row_patches.py",),
    ),
    sums(
        "factors/accumulate/patches.py",
        "blocks[:, a, :, :, a + step].sub_(border)",
        "blocks[:, a, :, :, a + step].add_(border)",
        "sign of the border",
        ("tests/factors/test_row_patches.py",),
    ),
    # Structures: algebra of Kronecker products.
    structures(
        "factors/blocks/kronecker.py",
        "return sign, self.rows * log_a + self.columns * log_b",
        "return sign, self.columns * log_a + self.rows * log_b",
        "swapped sizes",
    ),
    structures(
        "factors/blocks/kronecker.py",
        "product = self.B.values[0] @ M[0, 0] @ self.A.values[0].T",
        "product = self.B.values[0] @ M[0, 0] @ self.A.values[0]",
        "missing transpose",
    ),
    structures(
        "factors/blocks/kronecker.py",
        "self.B.scaled(self.A.scale).plus(other.B.scaled(other.A.scale))",
        "self.B.plus(other.B)",
        "scales lost in a sum",
    ),
    structures(
        "factors/blocks/factor.py",
        "return sign * self.scale.sign() ** self.size,",
        "return sign,",
        "sign of a negative scale",
    ),
    structures(
        "factors/blocks/factor.py",
        "return replace(self, values=values, scale=1 / self.scale.to(values.dtype))",
        "return replace(self, values=values)",
        "scale not inverted",
    ),
    structures(
        "factors/blocks/factor.py",
        "return self.values.square().flatten(1).sum(1) * self.scale.square()",
        "return self.values.square().flatten(1).sum(1) * self.scale",
        "missing square",
    ),
    structures(
        "factors/blocks/damping.py",
        "return Kronecker(A.shift(pi * root), B.shift(root / pi))",
        "return Kronecker(A.shift(root / pi), B.shift(pi * root))",
        "swapped factors",
        ("tests/factors/test_damping.py",),
    ),
    structures(
        "factors/blocks/damping.py",
        "mean_A = structure.A.trace() / structure.columns",
        "mean_A = structure.A.trace()",
        "trace for mean eigenvalue",
        ("tests/factors/test_damping.py",),
    ),
    structures(
        "factors/blocks/damping.py",
        "means = torch.where(means == 0, torch.as_tensor(mean).to(relative), means)",
        "pass",
        "no fallback for blocks without curvature",
        ("tests/factors/test_damping.py",),
    ),
    structures(
        "factors/blocks/damping.py",
        'part = damping if method == "per-factor" else damping / len(structure.terms)',
        "part = damping",
        "damping of every term",
        ("tests/factors/test_kronecker_sum.py", "tests/factors/test_damping.py"),
    ),
    structures(
        "factors/blocks/eigenbasis.py",
        "noise=abs(factor) * self.noise",
        "noise=factor * self.noise",
        "sign of noise",
        ("tests/factors/test_round_off.py", "tests/factors/test_kronecker.py"),
    ),
    structures(
        "factors/blocks/dense.py",
        "(self.matrix @ M.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(M.shape)",
        "(self.matrix.transpose(1, 2) @ M.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(M.shape)",
        "extra transpose",
    ),
    structures(
        "factors/blocks/kronecker_sum.py",
        "torch.where(singular, -torch.inf, log - 2 * volume)",
        "torch.where(singular, -torch.inf, log - volume)",
        "wrong factor of a determinant",
    ),
    structures(
        "factors/blocks/kronecker_sum.py",
        "return sign * self.scale.sign() ** size,",
        "return sign,",
        "sign of a determinant with negative scale",
    ),
    # KFAC, EKFAC and their settings.
    kfac(
        "factors/ekfac.py",
        "mine.structure.like.add_(theirs.structure.like.to(mine.structure.like))",
        "pass",
        "merge adds nothing",
    ),
    kfac(
        "factors/ekfac.py",
        "R = factors.loss.reduction_factor(count)",
        "R = factors.loss.reduction_factor(factors.count)",
        "count of other data",
    ),
    kfac(
        "factors/block.py",
        "num_data=self.num_data + other.num_data",
        "num_data=other.num_data",
        "data of before forgotten",
    ),
    kfac(
        "factors/block.py",
        "R = self.loss.reduction_factor(self.count)",
        "R = self.loss.scale",
        "mean not divided",
    ),
    kfac(
        "factors/settings.py",
        "return self.max_dim is not None and size > self.max_dim",
        "return self.max_dim is not None and size >= self.max_dim",
        "off by one",
        ("tests/factors/test_kfac.py", "tests/factors/test_edges.py"),
    ),
    kfac(
        "factors/settings.py",
        "first_sample=self.first_sample + self.mc_samples",
        "first_sample=self.first_sample",
        "the same draws twice",
        ("tests/factors/test_fresh_draws.py",),
    ),
    kfac(
        "factors/settings.py",
        'self.sharing.get(name, self.sharing.get(name.rpartition(".")[0], "expand"))',
        'self.sharing.get(name.rpartition(".")[0], "expand")',
        "settings of single parameters ignored",
    ),
    kfac(
        "factors/layout.py",
        "b.copy_(M[..., -1].reshape(b.shape))",
        "b.copy_(M[..., 0].reshape(b.shape))",
        "wrong column of the bias",
        ("tests/factors/test_kfac.py", "tests/factors/test_layout.py", "tests/factors/test_products.py"),
    ),
    # Recorded computations.
    recording(
        "runtime/cuda_graphs.py", '"_backward_hooks", "_backward_pre_hooks")', '"_backward_hooks")', "hooks ignored"
    ),
    recording("runtime/cuda_graphs.py", "yield from value", "pass", "keys of dictionaries ignored"),
    recording(
        "runtime/cuda_graphs.py",
        "changed = mine.keys() ^ theirs.keys()",
        "changed = mine.keys() - theirs.keys()",
        "new attributes ignored",
    ),
    recording("runtime/cuda_graphs.py", "torch.get_default_dtype(),", "", "default dtype ignored"),
    recording("runtime/cuda_graphs.py", "torch.get_autocast_dtype(device.type),", "", "dtype of autocast ignored"),
    recording(
        "runtime/cuda_graphs.py",
        "self.numbers.copy_(torch.tensor(numbers, dtype=torch.float64), non_blocking=True)",
        "pass",
        "index of the first example not updated",
        ("tests/operators/test_recorded_products.py", "tests/factors/test_replay.py"),
    ),
    recording(
        "runtime/cuda_graphs.py",
        "host.add_counts({name: -value for name, value in added.items()})",
        "pass",
        "recorded batch counted twice",
        ("tests/factors/test_replay.py",),
    ),
    recording(
        "runtime/cuda_graphs.py",
        "if why or guard.place != kind.guard.place:",
        "if why:",
        "other memory of parameters ignored",
    ),
    recording(
        "runtime/cuda_graphs.py",
        "patience = patience + 1 if kind.replays < _WORTH else 1",
        "patience = 1",
        "models that change often recorded again and again",
        ("tests/factors/test_replayer.py",),
    ),
    recording(
        "runtime/cuda_graphs.py",
        "self._recorder = None  # PyTorch cannot record",
        "pass  # PyTorch cannot record",
        "memory pool of freed graphs used again",
        ("tests/factors/test_replayer.py",),
    ),
    # The optimizer.
    optim("optim/update_rule.py", "1 - share.momentum**2)", "1 - share.momentum)", "missing look-ahead"),
    optim(
        "optim/update_rule.py",
        "return 1 / (1 - decay**age)",
        "return 1.0",
        "no correction of the start at zero",
    ),
    optim(
        "optim/update_rule.py",
        "radius = trust * sqrt(max(1.0, rows / columns))",
        "radius = trust * sqrt(min(1.0, rows / columns))",
        "min for max",
    ),
    optim("optim/update_rule.py", "result: Tensor = P * shrink.sqrt()", "result: Tensor = P * shrink", "missing root"),
    optim(
        "optim/update_rule.py",
        "1 - kept_squares)",
        "kept_squares)",
        "old and new swapped",
        ("tests/optim/test_kfac.py", "tests/optim/test_trajectory.py", "tests/optim/test_update_rule.py"),
    ),
    optim(
        "optim/averages.py",
        "inputs = K.A.trace() / (K.A.size * uses)",
        "inputs = K.A.trace() / K.A.size",
        "inputs of all positions together",
        ("tests/optim/test_update_rule.py",),
    ),
    optim(
        "optim/averages.py",
        "weight = decay * old[:, 0] + 1 - decay",
        "weight = torch.ones_like(old[:, 0])",
        "no correction of the start at zero",
        ("tests/optim/test_curvature.py", "tests/optim/test_trajectory.py"),
    ),
    optim(
        "optim/averages.py",
        "new = torch.where(good, new, old)",
        "pass",
        "a refused batch counts",
        (
            "tests/optim/test_curvature.py",
            "tests/optim/test_watched_factors.py",
            "tests/optim/test_safety.py",
            "tests/optim/test_pending_checks.py",
        ),
    ),
    optim(
        "optim/averages.py",
        "return replace(factor, values=factor.values.square())",
        "return factor",
        "rotation of eigenvalues without squares",
        ("tests/optim/test_curvature.py", "tests/optim/test_trajectory.py"),
    ),
    optim(
        "optim/inverses.py",
        "limits = tuple(trust if limit and trust is not None else torch.inf for trust in trusts)",
        "limits = tuple(torch.inf for trust in trusts)",
        "steps not limited",
        ("tests/optim/test_trajectory.py", "tests/optim/test_kfac.py"),
    ),
    optim(
        "optim/step_scale.py",
        "return -lr * KEPT_OF_STEPS / (1 - KEPT_OF_STEPS)",
        "return -lr / (1 - KEPT_OF_STEPS)",
        "wrong mean age of steps",
        ("tests/optim/test_step_scale.py",),
    ),
    optim(
        "optim/step_scale.py",
        "logarithm = torch.minimum(old.logarithm + change, old.ceiling)",
        "logarithm = torch.maximum(old.logarithm + change, old.ceiling)",
        "max for min",
        ("tests/optim/test_step_scale.py",),
    ),
    optim(
        "optim/step_scale.py",
        "(self._peak / lr) ** 2",
        "(self._peak / lr)",
        "missing square",
        ("tests/optim/test_step_scale.py",),
    ),
    optim(
        "optim/safety.py",
        'group["damping"] * damping_scale)',
        'group["damping"])',
        "damping scale missing in a message",
        ("tests/optim/test_last_good_step.py",),
    ),
    optim(
        "optim/safety.py",
        "forgotten = (refusals - _FORGOTTEN * good).clamp(min=0)",
        "forgotten = refusals * ~good",
        "one usual size forgets all refusals",
        ("tests/optim/test_safety.py", "tests/optim/test_events.py", "tests/optim/test_last_good_step.py"),
    ),
    optim(
        "optim/preconditioner.py",
        "share = 1 / self.unit",
        "share = 1.0",
        "natural gradients of a sum over examples",
        ("tests/optim/test_preconditioner.py",),
    ),
    optim(
        "optim/preconditioner.py",
        "_version == version or not self.watch.was_called:",
        "_version == version:",
        "clipped natural gradients are multiplied again",
        ("tests/optim/test_preconditioner.py",),
    ),
    optim(
        "optim/kfac.py",
        "p.grad = None",
        "pass",
        "another optimizer sees the gradients of all parameters",
        ("tests/optim/test_rest.py",),
    ),
    optim(
        "optim/apply.py",
        "adamw else lr, 1 - lr * decay)",
        "adamw else lr, 1 - decay)",
        "weight decay without learning rate",
        ("tests/optim/test_kfac.py", "tests/optim/test_trajectory.py"),
    ),
    optim(
        "optim/curvature.py",
        "lrs[n] ** 2 * (v * D[n]).sum()",
        "lrs[n] * (v * D[n]).sum()",
        "missing square in KL clipping",
        ("tests/optim/test_kfac.py", "tests/optim/test_trajectory.py"),
    ),
    optim(
        "optim/apply.py",
        "overshoot = 0.5 * scale[2].exp()",
        "overshoot = scale[2].exp()",
        "missing half",
        ("tests/optim/test_step_scale.py",),
    ),
    optim(
        "optim/watch.py",
        "first_datum = self.first_datum + sum(waiting.all_data for waiting in self._complete)",
        "first_datum = self.first_datum",
        "the same draws in every pass of a step",
        ("tests/optim/test_passes.py", "tests/optim/test_curvature.py", "tests/optim/test_watched_factors.py"),
    ),
    optim(
        "optim/watch.py",
        'node.name() == "ToCopyBackward0"',
        'node.name() == "CloneBackward0"',
        "gradient of a copy of predictions, not of the original that the model's loss depends on",
        ("tests/optim/test_integration.py",),
    ),
    optim(
        "optim/watch.py",
        "restored(model, g.device, refuse=False),",
        "nullcontext(),",
        "random numbers of the training drawn by predictions that are computed apart",
        ("tests/optim/test_integration.py",),
    ),
    optim(
        "optim/watch.py",
        "[g.unsqueeze(0).to(self._f.dtype)]",
        "[g.sign().unsqueeze(0).to(self._f.dtype)]",
        "empirical Fisher of a fused loss with another gradient",
        ("tests/optim/test_integration.py",),
    ),
    optim(
        "optim/watch.py",
        "call.depth += 1",
        "pass",
        "end of an inner call taken for the outer one's",
        ("tests/optim/test_call.py", "tests/optim/test_passes.py", "tests/optim/test_integration.py"),
    ),
    optim(
        "optim/loss_check.py",
        "return over_each or all(_same(s, scale / (total / self.ranks)) for s, _ in parts)",
        "return over_each",
        "mean over several passes refused",
        ("tests/optim/test_loss_check.py",),
    ),
    optim(
        "optim/loss_check.py",
        "[(sums.square / (2 * value), sums.count)]",
        "[(sums.square / value, sums.count)]",
        "wrong factor of the square loss",
        ("tests/optim/test_loss_check.py",),
    ),
    # Influence.
    influence(
        "influence/cost.py",
        "total[1] += float(product.squared_norms().sum())",
        "total[1] += float(block.squared_norms().sum())",
        "wrong denominator",
        ("tests/influence/test_cost.py",),
    ),
    influence(
        "influence/scoring.py",
        "start + most - sum(map(len, pending)))",
        "start + most)",
        "more memory than allowed",
        ("tests/influence/test_cost.py", "tests/influence/test_influence.py"),
    ),
    influence(
        "influence/scoring.py",
        "key=lambda count: (counts[count], count)",
        "key=lambda count: count",
        "largest instead of most frequent number",
        ("tests/influence/test_tokens.py",),
    ),
    influence(
        "influence/scoring.py",
        "scale if queries.own is None else scale * _inverse_root(queries.own).unsqueeze(1)",
        "scale",
        "cosine not divided by the query's norm",
        ("tests/influence/test_influence.py",),
    ),
    influence(
        "influence/ways.py",
        "left_out = s[..., rank:].square().sum((0, 2)).sqrt()",
        "left_out = s[..., rank + 1 :].square().sum((0, 2)).sqrt()",
        "off by one",
        ("tests/influence/test_cost.py",),
    ),
    influence(
        "influence/scoring.py",
        "indices = torch.arange(first, first + values.shape[1]",
        "indices = torch.arange(0, values.shape[1]",
        "indices within batches",
        ("tests/influence/test_influence.py",),
    ),
    influence(
        "influence/scoring.py",
        "sign = sign_of(request.of) * sign_of(request.of_train)",
        "sign = sign_of(request.of)",
        "sign of the training data's quantity",
        ("tests/influence/test_influence.py",),
    ),
    influence(
        "influence/cost.py",
        "passes = -(-queries // most)",
        "passes = queries // most",
        "rounded down",
        ("tests/influence/test_cost.py",),
    ),
    influence(
        "influence/index.py",
        "if self.place + 1 < len(self._identities):",
        "if self.place < len(self._identities):",
        "off by one",
        ("tests/influence/test_index_files.py", "tests/influence/test_index.py"),
    ),
    influence(
        "influence/index.py",
        "if known and self._identities[self._offset + place] != self.last_seen:",
        "if known and self._identities[place] != self.last_seen:",
        "data of other ranks than those that made an index",
        ("tests/distributed/test_influence.py",),
    ),
    influence(
        "influence/scoring.py",
        "                for _ in self.of(()):",
        "                for _ in ():",
        "ranks without a batch do not take part in sending blocks",
        ("tests/distributed/test_influence.py",),
    ),
    kfac(
        "factors/blocks/block_diagonal.py",
        "known[id(t)] if id(t) in known else t.to(device)",
        "t.to(device)",
        "copies of eigenvectors",
        ("tests/factors/test_host_memory.py",),
    ),
    kfac(
        "factors/compute.py",
        "return min(found) // SHARE if found else None",
        "return min(found) if found else None",
        "no memory for anything but sums",
        ("tests/factors/test_host_memory.py",),
    ),
    data(
        "problem/layer_by_layer.py",
        "self._layers[self._place[module]] if module in self._place else ()",
        "()",
        "layers are not freed",
        ("tests/distributed/test_sharded_layers.py",),
    ),
    # Laplace.
    laplace(
        "laplace/evidence.py",
        "risk.value() / risk.reduction_factor",
        "risk.value()",
        "mean for sum",
        ("tests/laplace/test_evidence.py",),
        near="def log_likelihood(",
    ),
    laplace(
        "laplace/evidence.py",
        "log(likelihood.noise * (2 * pi) ** 0.5)",
        "log(likelihood.noise * (2 * pi))",
        "missing root",
        ("tests/laplace/test_evidence.py",),
    ),
    laplace(
        "laplace/evidence.py",
        "return 2 * criteria / variance + effective - num_targets",
        "return 2 * criteria / variance - num_targets",
        "effective parameters ignored",
        ("tests/laplace/test_evidence.py",),
    ),
    laplace(
        "laplace/likelihood.py",
        "(self.noise or 1.0) ** 2 * self.temperature)",
        "(self.noise or 1.0) ** 2)",
        "temperature ignored",
        ("tests/laplace/test_posterior.py",),
    ),
    laplace(
        "laplace/posterior.py",
        "(1 + pi / 8 * variance).sqrt()",
        "(1 + pi / 8 * variance)",
        "missing root",
        ("tests/laplace/test_posterior.py",),
    ),
    laplace(
        "laplace/posterior.py",
        "- 2 * log(classes)",
        "- log(classes)",
        "missing square",
        ("tests/laplace/test_posterior.py",),
    ),
    laplace(
        "laplace/posterior.py",
        "add_((self.likelihood.noise or 0.0) ** 2)",
        "add_(self.likelihood.noise or 0.0)",
        "standard deviation for variance",
        ("tests/laplace/test_posterior.py",),
    ),
    laplace(
        "laplace/variance.py",
        "weights = x.square() @ structure.values.transpose(1, 2)",
        "weights = x @ structure.values.transpose(1, 2)",
        "missing square",
        ("tests/laplace/test_posterior.py",),
    ),
    # Merging.
    merging(
        "merging/systems.py",
        "return max(damping[block] for block, params",
        "return min(damping[block] for block, params",
        "min for max",
        ("tests/merging/test_merge.py",),
    ),
    merging(
        "merging/systems.py",
        "(stack.layouts[0], stack.apply(damped, added, self.method).scaled(self.weight))",
        "(stack.layouts[0], stack.apply(damped, added, self.method))",
        "weights ignored",
        ("tests/merging/test_merge.py",),
    ),
    merging(
        "merging/systems.py",
        "delta = delta.fraction * total / C.shape[0]",
        "delta = delta.fraction * total",
        "trace for mean eigenvalue",
        ("tests/merging/test_merge.py",),
    ),
    merging(
        "merging/systems.py",
        "found = {key: start[key] + solution.x[key] for key in start}",
        "found = {key: solution.x[key] for key in start}",
        "average missing after an iteration",
        ("tests/merging/test_merge.py",),
    ),
    merging(
        "merging/models.py",
        "share = {i: source.weight / total for i, source in sources.items()}",
        "share = {i: source.weight for i, source in sources.items()}",
        "weights not normalized",
        ("tests/merging/test_merge.py",),
    ),
    merging(
        "merging/entries.py",
        "total += weight / sum(weights) * t.to(first.device, wide)",
        "total += t.to(first.device, wide) / len(weights)",
        "weights ignored",
        ("tests/merging/test_entries.py",),
    ),
    # Compression.
    compress(
        "compress/channels.py",
        "(float(channels.costs[place]) / channels.saved, number, place)",
        "(float(channels.costs[place]), number, place)",
        "cost not divided by numbers saved",
        ("tests/compress/test_channels.py",),
    ),
    compress(
        "compress/channels.py",
        "row = columns_in(source) + (source.bias is not None)",
        "row = columns_in(source)",
        "bias not counted",
        ("tests/compress/test_channels.py",),
    ),
    compress(
        "compress/eigen.py",
        "return rows * int(kept.any(2).sum()) + columns * int(kept.any(1).sum())",
        "return columns * int(kept.any(2).sum()) + rows * int(kept.any(1).sum())",
        "swapped sizes of bases",
        ("tests/compress/test_eigen.py",),
    ),
    compress(
        "compress/factorization.py",
        "places[layer] = fitting[0] if fitting else after",
        "places[layer] = fitting[-1] if fitting else after",
        "more removed than needed",
        ("tests/compress/test_low_rank.py",),
    ),
    compress(
        "compress/factorization.py",
        "lost = [0.5 * float(self.costs[rank:].sum())",
        "lost = [0.5 * float(self.costs[:rank].sum())",
        "cost of what is kept",
        ("tests/compress/test_low_rank.py",),
    ),
    compress(
        "compress/surgery.py",
        "system.diagonal().add_(layer.damping)",
        "pass",
        "damping missing",
        ("tests/compress/test_weights.py",),
    ),
    compress(
        "compress/surgery.py",
        "return layer.matrix.square() * (layer.structure.diagonal() + layer.damping)",
        "return layer.matrix.square() * layer.structure.diagonal()",
        "damping missing",
        ("tests/compress/test_weights.py",),
    ),
    compress(
        "compress/layers.py",
        "mean = float(self.structure.trace().sum()) / self.size",
        "mean = float(self.structure.trace().sum())",
        "trace for mean eigenvalue",
        ("tests/compress/test_weights.py", "tests/compress/test_channels.py"),
    ),
    compress(
        "compress/channels.py",
        "if targets.count(name) == 1 and name not in read}",
        "if name not in read}",
        "layers that are used twice",
        ("tests/compress/test_channels.py",),
    ),
    compress(
        "compress/pruning.py",
        "surgeon(layer, matrix) if update else damage(layer), -1.0)",
        "surgeon(layer, matrix) if update else damage(layer), torch.inf)",
        "removed weights may come back",
        ("tests/compress/test_weights.py",),
    ),
    # Several processes.
    distributed(
        "distributed/assignment.py",
        "return self.itemsize * self.groups * self.size**2",
        "return self.itemsize * self.size**2",
        "groups not counted",
        ("tests/distributed/test_placement.py",),
    ),
    distributed(
        "distributed/assignment.py",
        "return max(held) * self.ranks / sum(held)",
        "return max(held) / sum(held)",
        "wrong scale of imbalance",
        ("tests/distributed/test_placement.py",),
    ),
    distributed(
        "distributed/assignment.py",
        "room[subset] -= sizes[name]",
        "pass",
        "room never used up",
        ("tests/distributed/test_placement.py", "tests/factors/test_placement.py", "tests/factors/test_memory.py"),
    ),
    distributed(
        "distributed/collectives.py",
        "copies = {name: t.detach().clone(memory_format=torch.contiguous_format)",
        "copies = {name: t.detach()",
        "arguments are overwritten",
        ("tests/distributed/test_summing.py", "tests/distributed/test_risk.py"),
    ),
    distributed(
        "distributed/collectives.py",
        "torch._foreach_zero_([part.detach() for part in bucket])",
        "pass",
        "sums of others are kept",
        ("tests/distributed/test_optimizer_exchanges.py",),
    ),
    distributed(
        "distributed/distribution.py",
        "start = sum(sizes[: self.ranks.rank])",
        "start = 0",
        "numbers of ranks overlap",
        ("tests/distributed/test_owners.py",),
    ),
    distributed(
        "distributed/assignment.py",
        "sorted(work, key=lambda name: (-work[name], name))",
        "sorted(work)",
        "the longest work does not come first",
        ("tests/distributed/test_optimizer_exchanges.py",),
    ),
    distributed(
        "optim/across_ranks.py",
        "return self.average is average and self.damping == damping",
        "return self.average is average",
        "inverses ahead of time with another damping",
        ("tests/distributed/test_optimizer_exchanges.py",),
    ),
    distributed(
        "optim/curvature.py",
        "self._ahead.clear()",
        "pass",
        "inverses of earlier averages",
        ("tests/distributed/test_sharded_owners.py",),
        near="add_factors(pairs, self.decay, good)",
    ),
    distributed(
        "optim/across_ranks.py",
        "for average in found if average.owner is not None}",
        "for average in found if False}",
        "blocks of a weight have several owners",
        ("tests/distributed/test_optimizer_exchanges.py",),
    ),
    distributed(
        "optim/across_ranks.py",
        "return max(size if size is not None and isfinite(size) else inf for size in sizes)",
        "return min(size if size is not None and isfinite(size) else inf for size in sizes)",
        "sizes of one rank decide",
        ("tests/distributed/test_optimizer.py",),
    ),
    # Differential equations.
    pinn(
        "pinn/taylor.py",
        "second = second + 2 * space.inner(a.rest, b.rest)",
        "second = second + space.inner(a.rest, b.rest)",
        "product rule of second derivatives",
    ),
    pinn(
        "pinn/taylor.py", "terms = [comb(k - 1, i - 1) *", "terms = [comb(k, i - 1) *", "coefficients of Faà di Bruno"
    ),
    pinn("pinn/taylor.py", "higher = [torch.where(linear", "higher = [torch.where(~linear", "threshold of softplus"),
    pinn(
        "pinn/taylor.py",
        "while is_functorch_wrapped_tensor(found):",
        "while False:",
        "coefficients that depend on the point",
    ),
    pinn(
        "pinn/problem.py",
        "return r.reshape(len(points), -1)",
        "return r.reshape(-1, 1)",
        "residuals of one point taken for several points",
    ),
    pinn(
        "pinn/optimizer.py",
        "scale * (count / some) ** 0.5",
        "scale",
        "scale of some of the points",
    ),
    pinn("pinn/optimizer.py", "self._direction = direction if size else {}", "self._direction = direction", "momentum"),
    pinn(
        "pinn/natural_gradient.py",
        "damping = max(10 * damping, torch.finfo(J.dtype).eps * trace)",
        "pass",
        "no more damping after a failed decomposition",
    ),
    pinn(
        "problem/torch_fixes.py",
        "for name, t in old.items() if id(own.get(name)) in given",
        "for name, t in old.items() if False",
        "parameters of repeated modules are lost",
        ("tests/pinn", "tests/problem/test_isolation.py"),
    ),
    # Files.
    storage(
        "files.py",
        "(-tensors[name].dtype.itemsize, name)",
        "(tensors[name].dtype.itemsize, name)",
        "order of tensors",
    ),
    storage("files.py", "room -= len(part)", "room -= 1", "pieces too large"),
    storage(
        "files.py", 'return file.read(64).decode(errors="replace") == digest', "return True", "damage goes unnoticed"
    ),
    storage("files.py", 'name += "\'"', "break", "two tensors of one name"),
    storage(
        "factors/checkpoint.py",
        "if not seen.overlaps(self._done):",
        "if True:",
        "data in two files count twice",
        ("tests/factors/test_checkpoint.py", "tests/distributed/test_resume.py"),
    ),
    # The conformance kit.
    conformance(
        "conformance/checks.py",
        'for reduction, factor in (("mean", 1.0), ("sum", 2.0)):',
        'for reduction, factor in (("mean", 1.0), ("sum", 1.0)):',
        "wrong relation",
    ),
    conformance("conformance/checks.py", "if not error <= tolerance:", "if error > tolerance:", "NaN accepted"),
    conformance(
        "conformance/checks.py",
        "changed = [name for name, value in before.items() if after[name] != value]",
        "changed = []",
        "changes of state accepted",
    ),
    conformance("conformance/diagnosis.py", '(1 / value, "too small")', '(value, "too small")', "wrong diagnosis"),
    conformance("conformance/tolerances.py", "MC = 0.2", "MC = 2.0", "tolerance too large"),
    conformance(
        "conformance/runner.py",
        'elif reason is not None and status == "passed":',
        'elif reason is None and status == "xpassed":',
        "unexpected passes accepted",
    ),
    conformance(
        "conformance/diagnosis.py",
        "B = block.B * float((lengths**power).sum() / places)",
        "B = block.B",
        "wrong suspect of padded rows",
    ),
]

MUTANTS = tuple(_numbered(_MUTANTS))
