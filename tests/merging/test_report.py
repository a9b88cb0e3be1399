"""The report of a merge, and its progress line."""

import pytest

import kfs
from kfs.merging import MergedBlock, MergeReport
from tests.merging.models import family, mlp, risks_of


def test_report() -> None:
    blocks = (
        MergedBlock("0", ("0.weight", "0.bias"), True, 0, 1e-16, {0: 0.1, 1: 0.25}),
        MergedBlock("2", ("2.weight",), False, 12, 3e-9, {0: 0.5, 1: 0.5}),
    )
    buffers = {"1.running_mean": "averaged", "1.running_var": "averaged", "1.num_batches_tracked": "added up"}
    report = MergeReport(blocks, (1.0, 2.0), ("3.weight",), buffers, 0.5)
    assert (report.iterations, report.residual) == (12, 3e-9)
    assert (
        str(report)
        == """\
Merge of 2 models: 2 blocks
  1 in closed form, 1 by conjugate gradients (12 iterations); largest residual 3.0e-09; 0.5 s
  weights: 1, 2; damping: exact
  averaged parameters, which no curvature covers: '3.weight'
  averaged: '1.running_mean', '1.running_var'
  added up: '1.num_batches_tracked'
blocks
block  solved by            iterations  residual  damping
-----  -------------------  ----------  --------  ---------
0      closed form                   0   1.0e-16  0.1, 0.25
2      conjugate gradients          12   3.0e-09  0.5, 0.5"""
    )
    assert repr(report) == str(report).partition("\nblocks\n")[0]
    assert "<table>" in report._repr_html_()


def test_a_report_is_returned_if_asked_for() -> None:
    models = family(mlp, 2)
    curvatures = [kfs.KFAC(risk) for risk in risks_of(models)]
    state, report = kfs.merge(models, curvatures, method="factored", report=True)
    assert state.keys() == kfs.merge(models, curvatures).keys()
    assert [block.name for block in report.blocks] == ["0", "2"]
    assert report.weights == (1.0, 1.0)
    assert report.seconds > 0
    assert report.residual == pytest.approx(0, abs=1e-10)
