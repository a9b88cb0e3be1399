"""The page of supported operations and losses is true: its table of losses lists the library's own cases."""

import re

from tests.docs.pages import DOCS
from tests.losses.cases import CASES

PAGE = (DOCS / "supported.md").read_text(encoding="utf-8")


def test_loss_table_is_true() -> None:
    rows = re.findall(
        r"^\| (.*?(?:Loss|Cross|Custom|SquaredError|DPO).*?) \| (.*?) \| (.*?) \| (.*?) \|$", PAGE, flags=re.MULTILINE
    )
    claims = {name: cells for name, *cells in rows}
    groups = {
        "mse": "`MSELoss`",
        "half": "`kfs.losses.HalfSquaredError`",
        "ce": "`CrossEntropyLoss`",
        "masked-lm": "`kfs.losses.TokenCrossEntropy`",
        "causal-lm": "`kfs.losses.TokenCrossEntropy`",
        "soft": "`kfs.losses.TokenCrossEntropy`",
        "kl": "`KLDivLoss`",
        "reward": "`kfs.losses.RewardPair`",
        "dpo": "`kfs.losses.RewardPair`",
        "bce": "`BCEWithLogitsLoss`",
        "poisson": "`PoissonNLLLoss`",
        "gaussian": "`GaussianNLLLoss`",
        "huber": "`HuberLoss`",
        "smooth": "`HuberLoss`",
        "log": "a function",
        "double": "a function",
        "my": "a function",
    }
    assert len(claims) == len(set(groups.values()))
    for case in CASES:
        group = groups.get(case.name, groups.get(case.name.split("-")[0], ""))
        (cells,) = [cells for name, cells in claims.items() if name.startswith(group)]
        ggn, type2, type1 = cells
        if group != "a function":
            assert ggn.startswith("yes") == case.convex, case
            assert type2.startswith("yes") == type1.startswith("yes") == (case.fisher != "none"), case
            assert ("equals the GGN" in type2) == (case.fisher == "equal") or "log_input" in type2, case
