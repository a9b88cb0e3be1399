"""Every rule alone: a pure function from descriptions of arguments to plans.

The oracle is autograd. For a plan, the sum over examples of outer products of output gradients and inputs must be the
gradient of the parameter.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from kfs.errors import ModelError
from kfs.factors.accumulate import Use
from kfs.factors.accumulate.inputs import OneHot, Rows, Vectors
from kfs.factors.accumulate.outer_products import OuterProductSum
from kfs.factors.accumulate.patches import Patches
from kfs.factors.layout import Layout
from kfs.factors.rows.row_map import by_length
from kfs.factors.rules import RULES
from kfs.factors.trace.discovery import prepared
from kfs.factors.trace.plan import Argument, Broadcast, Call, Copy, Plan, Rewrite, with_argument
from kfs.factors.trace.tracking import Tracked
from tests.operators.contract import close

N = 3


def r(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


@dataclass
class Case:
    """One call of an operation: named arguments, some of which are parameters."""

    name: str
    func: Any
    make: Callable[[], tuple[Any, ...]]
    params: tuple[int, ...] = (1,)
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


CASES = [
    Case("linear", F.linear, lambda: (r(N, 4), r(2, 4), r(2)), (1, 2)),
    Case("linear, positions", F.linear, lambda: (r(N, 5, 4), r(2, 4), r(2)), (1, 2)),
    Case("linear, only the bias", F.linear, lambda: (r(N, 5, 4), r(2, 4), r(2)), (2,)),
    Case("addmm", torch.addmm, lambda: (r(2), r(N, 4), r(4, 2)), (0, 2)),
    Case("matmul", torch.matmul, lambda: (r(N, 5, 4), r(4, 2))),
    Case("matmul from the left", torch.matmul, lambda: (r(2, 4), r(N, 4, 5)), (0,)),
    Case("mm", torch.mm, lambda: (r(N, 4), r(4, 2))),
    Case("einsum", torch.einsum, lambda: ("nsi,io->nso", r(N, 5, 4), r(4, 2)), (2,)),
    Case("einsum, heads", torch.einsum, lambda: ("ohk,nhk->no", r(3, 2, 4), r(N, 2, 4)), (1,)),
    Case("einsum, axes between", torch.einsum, lambda: ("nd,edf->nef", r(N, 4), r(3, 4, 2)), (2,)),
    Case("einsum, weight in front", torch.einsum, lambda: ("oi,nsi->nos", r(2, 4), r(N, 5, 4)), (1,)),
    Case("bilinear", F.bilinear, lambda: (r(N, 4), r(N, 3), r(2, 4, 3), r(2)), (2, 3)),
    Case("conv1d", F.conv1d, lambda: (r(N, 2, 7), r(4, 2, 3), r(4), 2, 1, 2), (1, 2)),
    Case("conv2d", F.conv2d, lambda: (r(N, 4, 5, 6), r(6, 2, 3, 2), r(6), (1, 2), (1, 0), 1, 2), (1, 2)),
    Case("conv2d, same", F.conv2d, lambda: (r(N, 2, 5, 6), r(3, 2, 3, 5), None, 1, "same")),
    Case("conv2d, only the bias", F.conv2d, lambda: (r(N, 2, 5, 6), r(3, 2, 3, 2), r(3)), (2,)),
    Case("conv3d", F.conv3d, lambda: (r(N, 2, 3, 4, 3), r(3, 2, 2, 2, 2), r(3)), (1, 2)),
    Case("conv_transpose1d", F.conv_transpose1d, lambda: (r(N, 2, 5), r(2, 3, 3), r(3), 2, 1, 1), (1, 2)),
    Case("conv_transpose1d, cropped", F.conv_transpose1d, lambda: (r(N, 2, 7), r(2, 3, 3), r(3), 1, 3), (1, 2)),
    Case("conv_transpose2d", F.conv_transpose2d, lambda: (r(N, 4, 3, 4), r(4, 3, 3, 2), r(6), 2, 0, 0, 2), (1, 2)),
    Case("embedding", F.embedding, lambda: (torch.randint(6, (N, 5)), r(6, 2))),
    Case("embedding, padding", F.embedding, lambda: (torch.randint(3, (N, 9)), r(3, 2), -1)),
    Case("layer_norm", F.layer_norm, lambda: (r(N, 5, 4), (4,), r(4), r(4)), (2, 3)),
    Case("layer_norm, two axes", F.layer_norm, lambda: (r(N, 5, 4), (5, 4), r(5, 4), r(5, 4), 0.1), (2, 3)),
    Case("rms_norm", F.rms_norm, lambda: (r(N, 5, 4), (4,), r(4), 0.1), (2,)),
    Case("group_norm", F.group_norm, lambda: (r(N, 4, 5), 2, r(4), r(4), 0.1), (2, 3)),
    Case("batch_norm", F.batch_norm, lambda: (r(N, 4, 5), r(4), r(4).abs(), r(4), r(4)), (3, 4)),
    Case("instance_norm", F.instance_norm, lambda: (r(N, 4, 5), None, None, r(4), r(4)), (3, 4)),
    Case("prelu", F.prelu, lambda: (r(N, 4, 5), r(4))),
    Case("prelu, one slope", F.prelu, lambda: (r(N, 4, 5), r(1))),
    Case("add", torch.add, lambda: (r(N, 5, 4), r(4))),
    Case("sub, rows", torch.sub, lambda: (r(N, 5, 4), r(1, 5, 4))),
    Case("mul, other axis", torch.mul, lambda: (r(N, 5, 4), r(5, 1))),
    Case("div", torch.div, lambda: (r(N, 4), r(4))),
    Case("rsub", Tensor.__rsub__, lambda: (r(N, 4), r(4))),
    Case("where", torch.where, lambda: (r(N, 4) > 0, r(4), r(N, 4))),
    Case("a number", torch.mul, lambda: (r(N, 4), r())),
]


def described(case: Case, args: tuple[Any, ...], meta: bool = False) -> list[Any]:
    """Describe arguments, optionally by tensors without values."""
    parts = []
    for place, part in enumerate(args):
        if not isinstance(part, Tensor):
            parts.append(part)
            continue
        t = part.to("meta") if meta else part
        tracked = Tracked(f"p{place}", t, place) if place in case.params else None
        parts.append(Argument.of((place,), t, tracked, data=tracked is None))
    return parts


def uses(planned: Any) -> list[Plan | Broadcast]:
    """Return all uses, including those of biases that may join."""
    found: list[Plan | Broadcast] = []
    for step in planned:
        found.append(step)
        if isinstance(step, Plan) and step.bias is not None:
            found.append(step.bias)
    return found


def gradient(case: Case, step: Plan | Broadcast, args: tuple[Any, ...]) -> tuple[Plan, Tensor, Tensor]:
    """Return a use's plan, and the parameter's gradient as matrices, by the plan and by autograd."""
    plan = step.plan if isinstance(step, Broadcast) else step
    assert plan is not None
    place = int(plan.layout.weight[1:])
    if isinstance(step, Broadcast):
        tapped = args[place].expand(step.shape).clone().requires_grad_()
        args, _ = with_argument(step.argument.place, tapped, args, {})
    leaf = args[place] if isinstance(step, Broadcast) else args[place].clone().requires_grad_()
    args = (*args[:place], leaf, *args[place + 1 :])
    out = case.func(*args)
    v = torch.randn_like(out)
    (exact,) = torch.autograd.grad(out, leaf, v)
    g = exact if isinstance(step, Broadcast) else v
    if isinstance(step, Broadcast):  # the gradient of an expanded parameter is the sum of all gradients
        shape = case.make()[place].shape
        exact = exact.sum_to_size(shape)
    x = prepared(plan, args, {})
    read = g.unsqueeze(0) if plan.read is None else plan.read(g.unsqueeze(0), x)
    with torch.no_grad():
        use = Use(plan.inputs, x, by_length(N, plan.inputs.leading(x)), ones=False)
        found = torch.cat(list(use.gradients(read[0])))
    assert len(found) == N
    exact = exact.reshape(plan.layout.shape) if exact.ndim == 0 else exact
    return plan, found.sum(0), plan.layout.matrix({plan.layout.weight: exact.unsqueeze(0)})[0]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_plans_give_the_parameters_gradients(case: Case) -> None:
    args = case.make()
    call = Call(case.func, N)
    steps = uses(RULES[case.func](call, *described(case, args)))
    assert len(steps) == len(case.params)
    for step in steps:
        plan, found, exact = gradient(case, step, args)
        close(found, exact)
        assert plan.operation
        wrong = exact.roll(1, 1) if exact.shape[1] > 1 else exact + 1
        assert (found - wrong).abs().max() > 1e-6  # misplaced entries would be noticed


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rules_look_at_no_values(case: Case) -> None:
    """Tensors without values give the same plans: layouts, kinds of inputs, and positions of arguments."""
    args, call = case.make(), Call(case.func, N)
    rule = RULES[case.func]
    real, meta = (uses(rule(call, *described(case, args, meta))) for meta in (False, True))
    for one, other in zip(real, meta, strict=True):
        mine, theirs = ((step.plan if isinstance(step, Broadcast) else step) for step in (one, other))
        assert mine is not None
        assert theirs is not None
        assert mine.layout == theirs.layout
        assert type(mine.inputs) is type(theirs.inputs)
        assert [a.place for a in mine.arguments] == [a.place for a in theirs.arguments]


def plan_of(func: Any, *args: Any, narrow: torch.dtype | None = None, num_data: int = N, **named: Any) -> Any:
    return RULES[func](Call(func, num_data, narrow), *args, **named)


def data(*shape: int, place: Any = 0) -> Argument:
    return Argument.of((place,), r(*shape), None, data=True)


def parameter(*shape: int, name: str = "w", place: Any = 1, view: Callable[[Tensor], Tensor] = lambda t: t) -> Argument:
    p = r(*shape)
    return Argument.of((place,), view(p), Tracked(name, p, name), data=False)


def test_layouts() -> None:
    (plan,) = plan_of(F.linear, data(N, 4), parameter(2, 4), parameter(2, name="b", place=2))
    assert plan.layout.weight == "w"
    assert (plan.layout.order, plan.layout.rows) == ((0, 1), (0, 2))
    assert plan.joins
    assert plan.bias.layout.weight == "b"
    assert isinstance(plan.inputs, Vectors)
    (plan,) = plan_of(torch.addmm, parameter(2, name="b", place=0), data(N, 4, place=1), parameter(4, 2, place=2))
    assert plan.layout.order == (1, 0)
    (plan,) = plan_of(F.linear, data(N, 4), parameter(4, 2, view=lambda t: t.T))
    assert plan.layout.order == (1, 0)
    (plan,) = plan_of(F.linear, data(N, 4), parameter(6, 4, view=lambda t: t[2:5]))
    assert plan.layout.rows == (2, 5)
    assert plan.layout.name == "w[2:5]"
    (plan,) = plan_of(F.linear, data(N, 4), parameter(3, 2, 4, view=lambda t: t[1]))
    assert plan.layout == Layout("w", (3, 2, 4), (1, 2), (0, 1, 2), 2)
    assert plan.layout.name == "w[1]"
    (plan,) = plan_of(torch.matmul, data(N, 4), parameter(3, 4, 2, view=lambda t: t[2]))
    assert plan.layout == Layout("w", (3, 4, 2), (2, 3), (0, 2, 1), 2)
    (plan,) = plan_of(F.conv2d, data(N, 4, 5, 5), parameter(6, 2, 3, 3), None, 1, 0, 1, 2)
    assert plan.layout.groups == 2
    assert isinstance(plan.inputs, Patches)
    (plan,) = plan_of(F.embedding, data(N, 5), parameter(7, 2), padding_idx=-1)
    assert plan.layout.order == (1, 0)
    assert isinstance(plan.inputs, OneHot)
    assert plan.inputs.padding == 6
    (step,) = plan_of(torch.add, data(N, 5, 4), parameter(5, 4))
    assert isinstance(step.plan.inputs, Rows)
    assert step.shape == (N, 5, 4)


def test_which_biases_may_join() -> None:
    """A whole bias joins a whole weight, and a part of it the same part of a weight."""
    x = data(N, 4)
    rows = parameter(6, 4, view=lambda t: t[2:5])
    for bias, joins in (
        (parameter(3, name="b", place=2), False),
        (parameter(6, name="b", place=2, view=lambda t: t[2:5]), True),
        (parameter(6, name="b", place=2, view=lambda t: t[1:4]), False),
    ):
        (plan,) = plan_of(F.linear, x, rows, bias)
        assert plan.joins is joins
    expert = parameter(5, 3, 4, view=lambda t: t[2])
    for bias, joins in (
        (parameter(5, 3, name="b", place=2, view=lambda t: t[2]), True),
        (parameter(5, 3, name="b", place=2, view=lambda t: t[1]), False),
        (parameter(4, 3, name="b", place=2, view=lambda t: t[2]), False),
        (parameter(3, name="b", place=2), False),
    ):
        (plan,) = plan_of(F.linear, x, expert, bias)
        assert plan.joins is joins
    assert plan_of(F.linear, x, parameter(3, 4), parameter(3, 3, name="b", place=2, view=lambda t: t[:, 0])) is None


def test_arguments_by_name() -> None:
    """Named arguments are found by name, in any order."""
    b, x, w = parameter(2, name="b", place="input"), data(N, 4, place="mat1"), parameter(4, 2, place="mat2")
    (plan,) = plan_of(torch.addmm, mat2=w, mat1=x, input=b)
    assert plan.arguments == (x,)
    assert plan.layout.weight == "w"
    (plan,) = plan_of(torch.matmul, other=parameter(4, 2, place="other"), input=data(N, 4, place="input"))
    assert plan.arguments[0].place == ("input",)
    tensors = {"input": r(2), "mat1": r(N, 4), "mat2": r(4, 2)}
    assert prepared(plan_of(torch.addmm, mat2=w, mat1=x, input=b)[0], (), tensors) is tensors["mat1"]


def test_autocast_narrows_inputs() -> None:
    (plan,) = plan_of(F.linear, Argument.of((0,), torch.randn(N, 4), None, data=True), parameter(2, 4),
                      narrow=torch.bfloat16)  # fmt: skip
    assert prepared(plan, (torch.randn(N, 4),), {}).dtype == torch.bfloat16
    (plan,) = plan_of(F.linear, data(N, 4), parameter(2, 4), narrow=torch.bfloat16)
    assert plan.prepare is None  # autocast does not change float64


def test_inputs_that_are_no_data_are_followed() -> None:
    constant = Argument.of((0,), r(5, 4), None, data=False)
    (plan,) = plan_of(F.linear, constant, parameter(2, 4))
    assert plan.follows
    (plan,) = plan_of(F.embedding, constant, parameter(7, 2))
    assert plan.follows


def test_inputs_count_their_vectors() -> None:
    x = r(N, 5, 4)
    for inputs, argument, count in (
        (Vectors(4), x, N * 5),
        (OneHot(3, torch.float64, 2), torch.tensor([[0, 1, 2], [2, 2, 0]]), 3),
        (Rows(None, 1, (N, 5), torch.float64, x.device), None, N * 5),
    ):
        total = OuterProductSum.zeros(inputs.size, 1, inputs.sparse, False, torch.float64, "cpu")
        assert inputs.add_to(total, argument, ones=False) == count  # type: ignore[arg-type]
    total = OuterProductSum.zeros(4, 1, False, False, torch.float64, "cpu")
    Vectors(4).add_to(total, x, ones=False)
    total.complete()
    close(total.total[0], sum((torch.outer(v, v) for v in x.reshape(-1, 4)), torch.zeros(4, 4, dtype=torch.float64)))


def test_what_rules_do_not_understand() -> None:
    x, w, constant = data(N, 4), parameter(2, 4), Argument.of((0,), r(N, 4), None, data=False)
    columns, stack = parameter(2, 8, view=lambda t: t[:, ::2]), data(3, N, 4)
    for nothing in (
        plan_of(F.linear, x, columns),
        plan_of(F.linear, parameter(3, 4, name="x"), w),
        plan_of(torch.addmm, x, x, parameter(4, 2), alpha=2),
        plan_of(torch.matmul, constant, parameter(4)),
        plan_of(torch.matmul, data(4), parameter(4)),
        plan_of(torch.matmul, parameter(4), data(4, N)),
        plan_of(torch.matmul, x, parameter(4, 2, view=lambda t: t[:, 0])),
        plan_of(F.linear, x, parameter(4)),
        plan_of(F.linear, x, parameter(2, 4, view=lambda t: t.view(torch.int64))),
        plan_of(F.linear, x, parameter(5, 4, view=lambda t: t.flatten()[2:10].view(2, 4))),
        plan_of(F.linear, x, parameter(3, 2, 4, view=lambda t: t.flatten(0, 1)[1:3])),
        plan_of(F.linear, x, parameter(3, 2, 4, view=lambda t: t[1, :1])),
        plan_of(F.linear, x, parameter(2, 3, 4, view=lambda t: t[:, 1])),
        plan_of(F.linear, x, parameter(2, 2, 2, 4, view=lambda t: t[1, 1])),
        plan_of(F.bilinear, x, x, parameter(2, 2, 4, 4, view=lambda t: t[1])),
        plan_of(torch.addmm, parameter(2, name="b"), x, parameter(4, 2), out=data(N, 2)),
        plan_of(torch.matmul, x, parameter(4, 2), out=data(N, 2)),
        plan_of(torch.bmm, stack, parameter(3, 4, 2), torch.float32),
        plan_of(torch.bmm, stack, parameter(3, 4, 2), out_dtype=torch.float32),
        plan_of(torch.bmm, stack, parameter(4, 3, 2, view=lambda t: t.transpose(0, 1))),
        plan_of(torch.bmm, stack, parameter(3, 4, 4, view=lambda t: t[:, :, :2])),
        plan_of(torch.bmm, parameter(3, 2, 4, name="x"), parameter(3, 4, 2)),
        plan_of(torch.bmm, data(0, N, 4), parameter(3, 4, 2, view=lambda t: t[:0])),
        plan_of(torch.einsum, "eni,eio->eno", data(0, N, 4), parameter(3, 4, 2, view=lambda t: t[:0])),
        plan_of(torch.matmul, data(4), parameter(3, 4, 2)),
        plan_of(torch.baddbmm, stack, stack, parameter(3, 4, 2), out=stack),
        plan_of(torch.baddbmm, stack, constant, parameter(3, 4, 2)),
        plan_of(torch._grouped_mm, x, parameter(3, 4, 2), bias=x),
        plan_of(torch._grouped_mm, x, parameter(3, 4, 2), out_dtype=torch.float32),
        plan_of(torch._grouped_mm, stack, x, parameter(3, name="offs")),
        plan_of(torch.einsum, "ni,i->n", constant, parameter(4)),
        plan_of(torch.einsum, "eni,eij->eij", stack, parameter(3, 4, 2)),
        plan_of(torch.einsum, "eni,ei->en", stack, parameter(3, 4)),
        plan_of(torch.einsum, "eni,eio->eno", constant, parameter(3, 4, 2)),
        plan_of(torch.einsum, "eni,eio->eno", data(1, N, 4), parameter(3, 4, 2)),
        plan_of(torch.einsum, "eni,eio->eno", data(4, N, 3), parameter(3, 4, 2, view=lambda t: t.transpose(0, 1))),
        plan_of(torch.einsum, "nei,ieo->neo", data(N, 3, 4), parameter(4, 3, 2)),
        plan_of(F.layer_norm, data(N, 2, 4), (2, 4), parameter(3, 4, view=lambda t: t[:2])),
        plan_of(torch.einsum, "ni,oi->n", x, w),
        plan_of(torch.einsum, "...i,oi->...o", x, w),
        plan_of(F.bilinear, x, constant, parameter(2, 4, 4)),
        plan_of(F.conv1d, data(2, 7), parameter(4, 2, 3)),
        plan_of(F.conv1d, Argument.of((0,), r(N, 2, 7), None, data=False), parameter(4, 2, 3)),
        plan_of(F.conv1d, data(N, 2, 7), parameter(4, 4, 3, view=lambda t: t[:, :2])),
        plan_of(F.layer_norm, constant, (4,), parameter(4)),
        plan_of(torch.add, constant, parameter(4)),
        plan_of(torch.cat, (data(N, 4), parameter(1, 4))),
        plan_of(Tensor.clone, parameter(4, 2, view=lambda t: t[1:])),
    ):
        assert nothing is None
    assert plan_of(Tensor.clone, parameter(4, 2)) == Copy("w")
    assert isinstance(plan_of(torch.bmm, stack, parameter(3, 4, 2)), Rewrite)
    assert isinstance(plan_of(torch.baddbmm, stack, stack, parameter(3, 4, 2)), Rewrite)
    assert isinstance(plan_of(torch._grouped_mm, x, parameter(3, 4, 2), data(3)), Rewrite)
    assert isinstance(plan_of(torch.einsum, "eni,eio->eno", stack, parameter(3, 4, 2)), Rewrite)
    with pytest.raises(ModelError, match="max_norm"):
        plan_of(F.embedding, x, w, max_norm=1.0)


CELLS = (torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell)
NETWORKS = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


def test_operations_that_consist_of_others() -> None:
    x, state, weights = data(N, 5, 4), data(1, N, 4), (parameter(4, 4),)
    for network in NETWORKS:
        assert isinstance(plan_of(network, x, state, weights, False, 1, 0.0, False, False, True), Rewrite)
        packed = Argument.of((1,), torch.ones(5, dtype=torch.int64), None, data=False)
        assert plan_of(network, x, packed, state, weights, False, 1, 0.0, False, False) is None
        assert isinstance(plan_of(network, x, state, weights, False, 2, 0.5, False, False, True), Rewrite)
        with pytest.raises(ModelError, match="uses dropout"):
            plan_of(network, x, state, weights, False, 2, 0.5, True, False, True)
    for cell in CELLS:
        assert isinstance(plan_of(cell, data(N, 4), data(N, 4), parameter(4, 4), parameter(4, 4)), Rewrite)
    assert isinstance(plan_of(F.multi_head_attention_forward, x, x, x), Rewrite)


def test_parameters_that_meet_attention_or_are_joined_to_data() -> None:
    q = data(N, 2, 5, 4)
    (step,) = plan_of(F.scaled_dot_product_attention, q, q, q, parameter(1, 2, 5, 5, place=3))
    assert step.shape == (N, 2, 5, 5)
    token = parameter(1, 1, 4, view=lambda t: t.expand(N, -1, -1))
    (step,) = plan_of(torch.cat, (token, data(N, 5, 4)), 1)
    assert step.argument == token
    assert step.shape == (N, 1, 4)


def test_every_rule_is_tested_here() -> None:
    tested = [case.func for case in CASES]
    tested += [*CELLS, *NETWORKS, F.multi_head_attention_forward, F.scaled_dot_product_attention]
    tested += [torch.cat, Tensor.clone, Tensor.__rmatmul__, torch.baddbmm, torch._grouped_mm, F.embedding_bag]
    tested += [torch.index_copy]
    assert {RULES[func] for func in tested} == set(RULES.values())


def test_products_from_the_right() -> None:
    (plan,) = plan_of(Tensor.__rmatmul__, parameter(4, 2, place=0), data(N, 4, place=1))
    assert plan.layout.order == (1, 0)
    assert plan.arguments[0].place == (1,)
