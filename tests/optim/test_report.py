"""The report of an optimizer, and its `repr`."""

from collections import OrderedDict
from html.parser import HTMLParser
from time import sleep
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfs.errors import SolverError
from kfs.factors.capture import CapturedPass
from kfs.losses import HalfSquaredError
from kfs.optim import KFAC
from kfs.optim.report import Costs
from tests.optim.training import data, mlp, train

LOSS = nn.CrossEntropyLoss()
X, Y = data()


class Mixed(nn.Module):
    """An embedding, a convolution with groups, and parameters that are not covered or not used."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 4)
        self.convolution = nn.Conv1d(4, 4, 3, groups=2, padding=1)
        self.last = nn.Linear(4, 3)
        self.bend = nn.Parameter(torch.ones(3))
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        f: Tensor = self.last(self.convolution(self.words(x).mT).mean(2))
        return torch.atan2(f, self.bend)


def test_before_the_first_step() -> None:
    """There are no factors and no costs yet."""
    report = KFAC(mlp(), LOSS).report()
    assert report.waiting == ("0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias")
    assert not report.blocks
    assert not any(cost.count for cost in report.costs.values())
    assert "No factors yet: 0.weight" in str(report)


@pytest.mark.filterwarnings("ignore:KFAC does not cover")
def test_what_is_covered_by_what() -> None:
    """Every parameter has a block, or is trained by AdamW, or is reported as waiting."""
    torch.manual_seed(0)
    model = Mixed().double()
    rest = [p for n, p in model.named_parameters() if not n.startswith("last")]
    groups = [{"params": rest}, {"params": model.last.parameters(), "method": "adamw", "lr": 0.3}]
    optimizer = KFAC(model, LOSS, groups, damping=0.01)
    train(model, optimizer, [(torch.randint(5, (12, 6)), Y)] * 2, LOSS)
    report = optimizer.report()
    rows = {row.block: row for row in report.blocks}
    assert (rows["words.weight"].A, rows["words.weight"].B) == ("diagonal 5", "dense 4x4")
    assert rows["convolution"].matrix == (2, 2, 7)  # two channels of a kernel of three, and a bias
    assert (rows["convolution"].A, rows["convolution"].B) == ("dense 7x7", "dense 2x2")
    # Factors and inverses of both groups, in float64.
    assert rows["convolution"].nbytes == 2 * 2 * (7 * 7 + 2 * 2) * 8
    assert rows["convolution"].params == ("convolution.weight", "convolution.bias")
    assert set(report.uncovered) == {"bend"}
    assert report.adamw == ("last.weight", "last.bias")
    assert report.waiting == ("unused.weight", "unused.bias")
    assert report.lr == (1.0, 0.3)
    assert report.damping == (0.01, 0.01)
    assert not report.on_host
    text = str(report)
    for part in ("convolution", "2x2x7", "diagonal 5", "AdamW trains 'bend': ", "as asked for: last.weight", "unused"):
        assert part in text
    assert max(map(len, report.summary.splitlines())) < 140


def test_costs() -> None:
    """Operations and counts follow from the matrices; time was measured."""
    model = nn.Linear(6, 4).double()
    optimizer = KFAC(model, HalfSquaredError(), factors_every=2, inverses_every=1)
    batch = (torch.randn(10, 6, dtype=torch.float64), torch.randn(10, 4, dtype=torch.float64))
    train(model, optimizer, [batch] * 4, HalfSquaredError())
    costs = optimizer.report().costs
    assert costs["products"].count == 1
    # for both inverses, for the Gram matrix of the trust region, and for the limit of singular values
    assert costs["products"].operations == 2 * (4 * 7 * 7 + 4 * 4 * 7 + 4 * 4 * 7 + 4 * 4 * 7)
    assert costs["factors"].count == 0.5  # every other step
    assert costs["factors"].operations == 0.5 * 2 * 10 * (7 * 7 + 4 * 4)
    assert costs["inverses"].count == 0.5
    assert costs["trials"].count == 0
    assert all(costs[part].seconds > 0 for part in ("factors", "inverses", "products"))
    assert optimizer.report().num_steps == 4


def test_factors_are_timed_with_the_vectors_that_are_sent_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """This takes place within the user's backward pass."""
    send_back = CapturedPass.send_back

    def slowly(*args: Any) -> None:
        sleep(0.01)
        send_back(*args)

    monkeypatch.setattr(CapturedPass, "send_back", slowly)
    model = mlp()
    optimizer = KFAC(model, LOSS, factors_every=1)
    train(model, optimizer, [(X, Y)] * 2, LOSS)
    assert optimizer.report().costs["factors"].seconds > 0.01
    assert "without what is added up during your passes" in str(optimizer.report())


def test_costs_of_long_runs() -> None:
    """Only recent steps count."""
    costs = Costs()
    for step in range(120):
        costs.add("factors", float(step >= 70))
        costs.end_step()
    assert len(costs.last) == 50
    assert costs.mean("factors").operations == 1.0


def test_trials_are_counted() -> None:
    """With a quadratic model, the loss is evaluated again in every step."""
    model = mlp()
    optimizer = KFAC(model, LOSS, quadratic_model=True)

    def closure() -> Tensor:
        optimizer.zero_grad()
        value: Tensor = LOSS(model(X), Y)
        value.backward()
        return value

    for _ in range(3):
        optimizer.step(closure)
    trials = optimizer.report().costs["trials"]
    assert trials.count >= 1
    assert trials.seconds > 0
    assert "trials" in str(optimizer.report())
    assert "quadratic_model=True" in repr(optimizer)


def test_report_after_events() -> None:
    """A report is a copy: later events do not change it."""
    model = mlp()
    optimizer = KFAC(model, LOSS, patience=1)
    train(model, optimizer, [(X, Y), (X * torch.nan, Y)], LOSS)
    report = optimizer.report()
    assert report.events.skipped_steps == 1
    assert report.damping_scale == 10
    assert list(report.damping) == pytest.approx([0.03])
    with pytest.raises(SolverError):
        train(model, optimizer, [(X * torch.nan, Y)] * 10, LOSS)
    assert report.events.skipped_steps == 1
    assert "events: skipped_steps 1, raised_damping 1" in report.summary
    assert report.summary in str(report)


def test_representation() -> None:
    """It is short, and has model, loss, settings and steps."""
    model = mlp()
    optimizer = KFAC(model, LOSS, trust=None, lr=0.02)
    train(model, optimizer, [(X, Y)], LOSS)
    lines = repr(optimizer).splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("KFAC for Layers (6 parameters, 83 numbers)")
    assert "CrossEntropy" in lines[0]
    assert lines[1].strip() == "lr=0.02, damping=0.003, momentum=0.9, weight_decay=0, trust=None"
    assert "fisher='mc'" in lines[2]
    assert lines[3].strip() == "steps=1, blocks=3, not covered=0, step_scale=1, damping_scale=1, events: none"


class Tags(HTMLParser):
    """Collects the cells of tables."""

    def __init__(self) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in {"td", "th"}:
            self.cells.append(data)


def test_html() -> None:
    """A notebook shows the same table; names are escaped."""
    model = nn.Sequential(OrderedDict({"<b>": nn.Linear(4, 3)})).double()
    optimizer = KFAC(model, LOSS)
    train(model, optimizer, [(X, Y)], LOSS)
    html = optimizer.report()._repr_html_()
    tags = Tags()
    tags.feed(html)
    assert not tags.open
    assert "<b>" in tags.cells
    assert "dense 5x5" in tags.cells
    assert "products" in tags.cells
    assert "&lt;b&gt;" in html
