"""The kit: kfs passes all checks; how answers are read, hints about wrong ones, reports, command line, plugin."""

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from kfs.cli import app
from kfs.conformance import (
    Adapter,
    CheckError,
    Result,
    built_in,
    checks,
    find,
    report,
    run,
    run_one,
    script,
    select,
)
from kfs.conformance.adapter import UnreadableError, read
from kfs.conformance.adapters.kfs import compute
from kfs.conformance.case import Setting
from kfs.conformance.cases import EXACT
from kfs.conformance.diagnosis import Facts, diagnose
from kfs.errors import ModelError
from kfs.factors import KFAC
from kfs.operators import GGN
from kfs.problem.risk import EmpiricalRisk
from tests.conformance import zoo
from tests.conformance.zoo import ZOO

ROOT = Path(__file__).parent.parent.parent
ONE = next(check for check in checks() if check.name == "exact: one example, mse mean, type-2, expand")


def test_we_pass_everything() -> None:
    results = list(run(find("kfs")))
    assert {result.status for result in results} == {"passed"}
    assert len(results) == len(checks()) > 100


def test_names_and_tags() -> None:
    names = [check.name for check in checks()]
    assert len(set(names)) == len(names)
    assert all(check.bug for check in checks())
    for tag in ("exact", "draws", "relation", "state", "type-2", "mc", "empirical", "expand", "reduce", "conv2d", "ce"):
        chosen = select([tag])
        assert chosen
        assert all(tag in check.tags for check in chosen)
    assert len(select(["exact", "conv2d"])) < len(select(["exact"]))
    assert {case.name for case in EXACT} <= {tag for check in checks() for tag in check.tags}


def matrix(model: Any, loss: Any, data: Any, fisher: Any, sharing: Any) -> Tensor:
    """A dense matrix instead of factors."""
    return KFAC(EmpiricalRisk(model, loss, data), fisher, sharing).to_dense()


def apart(model: Any, loss: Any, data: Any, fisher: Any, sharing: Any) -> Any:
    """Factors of weights and biases alone."""
    K = KFAC(EmpiricalRisk(model, loss, data), fisher, sharing, joint_bias=False)
    return {name: (block.A, block.B) for name, block in K.blocks.items() if block.layout.groups == 1}


@pytest.mark.parametrize(("compute", "flattening"), [(matrix, "rvec"), (zoo.columns, "cvec"), (apart, "rvec")])
def test_other_forms_of_answers(compute: Any, flattening: Any) -> None:
    adapter = Adapter("form", compute, flattening=flattening)
    for check in select(["linear", "mse"]):
        assert run_one(adapter, check).status == "passed", check.name


def test_groups_of_separate_weights() -> None:
    def averaged(model: Any, loss: Any, data: Any, fisher: Any, sharing: Any) -> Any:
        K = KFAC(EmpiricalRisk(model, loss, data), fisher, sharing, joint_bias=False)
        return {
            name: (b.A, b.B) if b.layout.groups == 1 else [(b.A.mean(0), B) for B in b.B]
            for name, b in K.blocks.items()
        }

    check = next(check for check in checks() if check.name.startswith("exact: groups of channels"))
    result = run_one(Adapter("averaged", averaged), check)
    assert "Input-based factors of different groups of channels are averaged" in result.message


def test_groups_may_come_as_stacks() -> None:
    def stacks(model: Any, loss: Any, data: Any, fisher: Any, sharing: Any) -> Any:
        K = KFAC(EmpiricalRisk(model, loss, data), fisher, sharing)
        return {name: (block.A, block.B) for name, block in K.blocks.items()}

    chosen = [check for check in checks() if check.name.startswith("exact: groups of channels")]
    assert {run_one(Adapter("stacks", stacks), check).status for check in chosen} == {"passed"}


def test_a_hidden_use_may_be_refused_or_right_but_not_forgotten() -> None:
    check = next(check for check in checks() if check.name.startswith("exact: a use in a custom function"))
    model, loss, data = _arguments(check.name)
    with pytest.raises(ModelError, match=r"linear\.weight"):
        compute(model, loss, data, "type-2", "reduce")
    assert run_one(find("kfs"), check).status == "passed"

    def exact(model: Any, loss: Any, data: Any, *_: Any) -> Any:
        return GGN(EmpiricalRisk(model, loss, data)).to_dense()

    assert run_one(Adapter("exact", exact), check).status == "passed"

    def unsupported(*_: Any) -> Any:
        raise NotImplementedError

    assert run_one(Adapter("unsupported", unsupported), check).status == "not supported"


def _arguments(check: str) -> Any:
    case = next(case for case in EXACT if check.startswith(f"exact: {case.name}, "))
    setting = case.setting()
    return setting.model, setting.loss, setting.data


def test_inputs_averaged_over_groups() -> None:
    """Some libraries behave in this way."""

    def averaged(model: Any, loss: Any, data: Any, fisher: Any, sharing: Any) -> Any:
        answer = compute(model, loss, data, fisher, sharing)
        X = data[0][0].flatten(1).reshape(2, -1).mean(0)
        x = torch.cat([X, torch.ones(1, dtype=X.dtype)])
        scale = answer["0"][0][0][-1, -1]
        return answer | {"0": [(scale * torch.outer(x, x), B) for _, B in answer["0"]]}

    check = next(check for check in checks() if check.name.startswith("exact: groups of channels"))
    result = run_one(Adapter("averaged", averaged), check)
    assert "Inputs of different groups of channels are averaged" in result.message


def test_answers_that_cannot_be_read() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2, bias=False))
    A, B = torch.eye(5), torch.eye(3)
    for answer, words in (
        (None, "returned a NoneType"),
        ({}, "returned a dict"),
        ({"layer": (A, B)}, "'layer' is neither a layer nor a parameter"),
        ({"0": (B, A)}, "they are swapped"),
        ({"0": (torch.eye(4), B)}, "no row for the bias"),
        ({"0": (torch.eye(7), B)}, r"have sizes .* expected"),
        ({"0": 3.0}, "'0' are not factors"),
        ({"0": [(A,)]}, r"not factors.*a list of pairs"),
        ({"0": (A, "B")}, "not factors"),
        ({"0": (torch.ones(5, 4), B)}, r"one has shape \[1, 5, 4\]"),
        ({"0": (torch.ones(1, 2, 5, 5), B)}, "one has shape"),
        ({"0": [(A, B), (torch.eye(4), B)]}, "not factors"),
        ({"0": []}, "not factors"),
        ({"0": (torch.stack([A, A]), B)}, "2 input-based and 1 gradient-based factors"),
        (torch.eye(3), r"has shape \[3, 3\], but there are 21 parameters"),
    ):
        with pytest.raises(UnreadableError, match=words):
            read(answer, model)
    others: list[tuple[Any, str]] = [
        ({"0": (A, B, A)}, "too many values to unpack"),  # rows of matrices are not diagonals
        ({"0": (A.numpy(), B.numpy())}, "a ndarray is not a tensor"),
        ({"0": (None, B)}, "a NoneType is not a tensor"),
        ({"0": (A + 1j, B)}, "a complex tensor has no real numbers"),  # not just its real part
        ({"0": (A.to("meta"), B)}, "a meta tensor has no real numbers"),
        (torch.eye(15) + 1j, "a complex tensor has no real numbers"),
    ]
    for wrong, words in others:
        with pytest.raises(UnreadableError, match=words):
            read(wrong, model)
    for stored in (A.to_sparse(), A.float(), A.requires_grad_()):
        assert torch.equal(read({"0": (stored, B)}, model).blocks["0.weight", "0.bias"], torch.eye(15).double())
    unreadable = run_one(Adapter("swapped", zoo.swapped), ONE)
    assert (unreadable.status, unreadable.bad) == ("unreadable", True)
    expected = run_one(Adapter("swapped", zoo.swapped, expected_failures={ONE.name: "known."}), ONE)
    assert (expected.status, expected.outcome) == ("expected failure", "unreadable")
    diagonal = read({"0": (torch.ones(5), 2 * torch.ones(3))}, model)
    assert torch.equal(diagonal.blocks["0.weight", "0.bias"], 2 * torch.eye(15, dtype=torch.float64))
    both = read({"0": (A, B), "again": (A, B)}, model, {"again": "0"})
    assert torch.equal(both.blocks["0.weight", "0.bias"], 2 * torch.eye(15, dtype=torch.float64))


def test_diagnoses() -> None:
    torch.manual_seed(0)
    X = torch.randn(9, 4, dtype=torch.float64)
    C = X.T @ X
    facts = Facts({"N": 5, "S": 7, "C": 3}, {"A known bug.": C.flip(0)})
    Q, _ = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))
    for block, words in (
        (C * torch.nan, "NaN"),
        (0 * C, "It is zero"),
        (C.flip(0), "A known bug."),
        (2.5 * C.flip(0), "A known bug. Besides, the scale is wrong by 2.5"),
        (5 * C, "too large by N = 5"),
        (C / 15, "too small by N C = 15"),
        (49 * C, "too large by S^2 = 49"),
        (1.1 * C, "right up to a scale of 1.1"),
        (torch.diag(C.diagonal()), "Its diagonal is right"),
        (Q @ C @ Q.T, "right eigenvalues"),
        (C + C.square(), "not a known mistake"),
    ):
        assert words in diagnose(block, C, facts)
    assert "not a known mistake" in diagnose(C + C.square(), C, Facts({}, {"Zero.": 0 * C}))


def test_outcomes() -> None:
    def status(compute: Any, **settings: Any) -> Result:
        return run_one(Adapter("some", compute, **settings), ONE)

    def unsupported(*_: Any) -> None:
        raise NotImplementedError

    def broken(*_: Any) -> None:
        raise RuntimeError("first line\nsecond line")

    def silent(*_: Any) -> None:
        raise RuntimeError

    def leaves(*_: Any) -> None:
        sys.exit()

    def warns(*args: Any) -> Any:
        warnings.warn("that is not right", UserWarning, stacklevel=2)
        return zoo.sum_for_mean(*args)

    wrong = zoo.sum_for_mean
    assert status(unsupported).status == "not supported"
    assert status(compute, unsupported=frozenset({"linear"})).message == "It does not claim to support linear."
    assert status(broken).message == "RuntimeError: first line"
    assert status(silent).message == "RuntimeError: "
    assert status(leaves).status == "failed"
    assert status(wrong).status == "silently wrong"
    assert status(warns).status == "failed"
    assert "It warned: that is not right" in status(warns).message
    known = {ONE.name: "known since version 1."}
    assert status(wrong, expected_failures=known).status == "expected failure"
    assert status(wrong, expected_failures=known).message.startswith("known since version 1.")
    assert not status(wrong, expected_failures=known).bad
    assert status(wrong, expected_failures=known).outcome == "silently wrong"
    assert status(compute, expected_failures=known).status == "unexpected pass"
    assert status(compute, expected_failures=known).bad


def test_float32_is_enough_where_it_is_announced() -> None:
    def single(model: Any, loss: Any, data: Any, fisher: Any, sharing: Any) -> Any:
        return {name: (A.float(), B.float()) for name, (A, B) in compute(model, loss, data, fisher, sharing).items()}

    assert run_one(Adapter("single", single), ONE).status == "silently wrong"
    assert run_one(Adapter("single", single, single=True), ONE).status == "passed"


def test_nan_checks_accept_errors_and_nan() -> None:
    check = next(check for check in checks() if check.name.startswith("relation: NaN"))

    def honest(model: Any, *_: Any) -> Any:
        P = sum(p.numel() for p in model.parameters())
        return torch.full((P, P), torch.nan)

    def refuses(*_: Any) -> None:
        raise NotImplementedError("no CE")

    assert run_one(Adapter("honest", honest), check).status == "passed"
    assert run_one(Adapter("refuses", refuses), check).status == "not supported"


def test_adapters_are_found() -> None:
    assert {"backpack", "curvlinops", "kfs", "kronfluence", "laplace", "nngeometry"} <= set(built_in())
    assert find("kfs").name == "kfs"
    assert find("tests.conformance.zoo:swapped").compute is zoo.swapped
    assert find("kfs.conformance.adapters.kfs:ADAPTER").name == "kfs"
    for target, words in (
        ("curvlinops", "cannot be imported"),
        ("nothing", "cannot be imported"),
        ("kfs.cli:nothing", "cannot be imported"),
        ("kfs:__version__", "is a str"),
    ):
        with pytest.raises(ModelError, match=words):
            find(target)


def test_scripts_reproduce_findings() -> None:
    target = "tests.conformance.zoo:sum_for_mean"
    with pytest.raises(CheckError, match="too large by C = 3"):
        exec(script(target, ONE.name), {})
    exec(script("kfs", ONE.name), {})


def test_command(tmp_path: Path) -> None:
    runner = CliRunner()
    files = ["--json", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html")]
    good = runner.invoke(app, ["check", "kfs", "--only", "one example", *files])
    assert good.exit_code == 0
    assert f"{len(select(['one example']))} passed" in good.output
    content = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert {result["status"] for result in content["results"]} == {"passed"}
    bad = runner.invoke(app, ["check", "tests.conformance.zoo:sum_for_mean", "--only", "one example", *files])
    assert bad.exit_code == 1
    assert "Repeat the first one" in bad.output
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "too large by C = 3" in page
    assert "repeat it" in page
    everything = runner.invoke(app, ["check", "kfs", "--only", "one example", "--verbose"])
    assert "exact: one example" in everything.output
    for arguments, words in (
        (["nothing"], "cannot be imported"),
        (["kfs", "--only", "nothing"], "Choose from: "),
        (["nothing", "--json", str(tmp_path / "no" / "r.json")], "its folder does not exist"),
    ):
        wrong = runner.invoke(app, ["check", *arguments])
        assert wrong.exit_code == 2
        assert words in wrong.output


def test_reports_of_expected_failures() -> None:
    adapter = Adapter("some", zoo.sum_for_mean, expected_failures={ONE.name: "known."}, version="1")
    results = [run_one(adapter, ONE)]
    assert report.summary(results) == "1 checks: 1 expected failure"
    assert report.table(adapter, results).row_count == 1
    assert report.progress(results, 5, "next").row_count == 1
    assert 'class="other"' in report.to_html(adapter, "some", results)


class Recorder:
    """A pytest plugin that records the outcome of every test."""

    def __init__(self) -> None:
        self.reports: list[pytest.TestReport] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.reports.append(report)


def test_pytest_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "adapters_of_a_test.py").write_text(
        "from kfs.conformance import Adapter\n"
        "from tests.conformance.zoo import sum_for_mean\n"
        f"known = Adapter('known', sum_for_mean, expected_failures={{{ONE.name!r}: 'known.'}})\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    # Without this option, every run here would collect the garbage of all tests several times.
    without = [
        part for name in ("cacheprovider", "faulthandler", "unraisableexception") for part in ("-p", f"no:{name}")
    ]
    common = ["-q", *without, "-o", "addopts=", str(tmp_path)]

    def outcome(*arguments: str) -> tuple[int, list[str], str]:
        recorder = Recorder()
        code = pytest.main([*common, *arguments], plugins=[recorder])
        return int(code), [r.outcome for r in recorder.reports], "".join(r.longreprtext for r in recorder.reports)

    only = ["--kfs-only", "one example", "--kfs-only", "mse"]
    assert outcome("--kfs-adapter=kfs", *only)[:2] == (0, ["passed"] * 4)
    code, outcomes, text = outcome("--kfs-adapter=tests.conformance.zoo:sum_for_mean", *only)
    assert (code, "failed" in outcomes) == (1, True)
    assert "too large by C = 3" in text
    code, outcomes, _ = outcome("--kfs-adapter=tests.conformance.zoo:compute_or_refuse", *only)
    assert (code, "skipped" in outcomes) == (0, True)
    narrow = [*only, "--kfs-only", "expand", "--kfs-only", "mean"]
    code, outcomes, text = outcome("--kfs-adapter=adapters_of_a_test:known", *narrow)
    assert (code, outcomes) == (0, ["skipped"])  # as pytest reports expected failures
    assert "known." in text
    assert outcome() == (5, [], "")  # nothing was collected
    for arguments in (["--kfs-adapter=nothing"], ["--kfs-adapter=kfs", "--kfs-only", "nothing"]):
        assert outcome(*arguments)[0] == 4  # a wrong call, not a run without tests


def test_pytest_plugin_in_a_process_of_its_own(tmp_path: Path) -> None:
    """pytest finds the plugin without `-p`, and the terminal shows the hints."""
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "-o", "addopts=", str(tmp_path)]
    only = ["--kfs-only", "one example", "--kfs-only", "mse"]
    done = subprocess.run(
        [*command, "--kfs-adapter=tests.conformance.zoo:sum_for_mean", *only],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "too large by C = 3" in done.stdout


def test_the_zoo_is_complete() -> None:
    """The zoo has every bug that the kit promises to reject."""
    promised = {
        "scaled by N", "scaled by S", "swapped", "bias forgotten", "sum for mean", "averaged loss",
        "labels instead of draws", "uncorrected draws", "unfolded wrongly", "groups averaged",
    }  # fmt: skip
    assert promised <= set(ZOO)


def test_implementations_that_remove_padding_pass() -> None:
    """Factors of sequences without padding pass, for both kinds of sharing."""

    def without(model: Any, loss: Any, data: Any, fisher: str, sharing: str) -> Any:
        return compute(model, loss, Setting(model, loss, data).unpadded().data, fisher, sharing)

    adapter = Adapter("without padding", without)
    chosen = [check for check in checks() if "padding" in check.tags]
    assert len(chosen) == 10
    for check in chosen:
        result = run_one(adapter, check)
        assert result.status == "passed", result.message


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite_are_wrong(wrong: float) -> None:
    """Comparisons with NaN are false, which must not count as agreement."""

    def broken(*args: Any) -> Any:
        return {name: (torch.full_like(A, wrong), B) for name, (A, B) in compute(*args).items()}

    result = run_one(Adapter("broken", broken), ONE)
    assert result.status == "silently wrong"
    assert "NaN or infinity" in result.message
