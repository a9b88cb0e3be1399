"""Language models as people train them: bad input has a message, and router losses are beside the main one."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfs import GGN, KFAC, EmpiricalRisk
from kfs.basics.ggns import vec_ggn
from kfs.errors import DataError, KfsError, ModelError, ShapeError
from kfs.losses import TokenCrossEntropy
from kfs.optim import KFAC as Optimizer  # noqa: N811 (both are called KFAC)

N, S, C = 5, 6, 11
LOSS = TokenCrossEntropy(shift=True)


class Language(nn.Module):
    """Predicts the next token from the current one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(C, 4).double(), nn.Linear(4, C).double()

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(self.table(input_ids).tanh())}


def tokens() -> Tensor:
    return torch.randint(C, (N, S), generator=torch.Generator().manual_seed(1))


def shifted(ids: Tensor) -> Tensor:
    return nn.functional.pad(ids[:, 1:], (0, 1), value=-100)


def beyond(ids: Tensor) -> Tensor:
    return torch.where(torch.arange(S) == 2, C, ids)


CASES: dict[str, tuple[Any, type[KfsError], str]] = {
    "shifted twice": ({"labels": shifted(tokens())}, DataError, r"Labels are shifted twice.*shift=False"),
    "ids beyond the vocabulary": (
        {"input_ids": beyond(tokens())},
        DataError,
        r"The index 11 of example \d does not exist in 'table.weight', which has 11 rows.*resize_token_embeddings",
    ),
    "labels beyond the vocabulary": (
        {"labels": beyond(tokens())},
        DataError,
        r"Labels go from 0 to 11, but there are 11 classes.*one with a head",
    ),
    "no label counts": ({"labels": torch.full((N, S), -100)}, DataError, "No target counts"),
    "labels as numbers": ({"labels": tokens().double()}, ShapeError, r"float64 targets \[5, 6\].*integer labels"),
    "labels in a list": ({"labels": tokens().tolist()}, DataError, "expected a tensor"),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input(name: str) -> None:
    changed, error, message = CASES[name]
    model = Language()
    before = {key: t.clone() for key, t in model.state_dict().items()}
    risk = EmpiricalRisk(model, LOSS, [{"input_ids": tokens(), "labels": tokens()} | changed])
    state = torch.get_rng_state()
    for call in (risk.value, risk.gradient, lambda: GGN(risk).to_dense(), lambda: KFAC(risk, fisher="mc")):
        with pytest.raises(error, match=message):
            call()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(t, before[key]) for key, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("name", ["missing key", "object"])
def test_unknown_collators(name: str) -> None:
    batch: Any = {"input_ids": tokens(), "target": tokens()} if name == "missing key" else object()
    risk = EmpiricalRisk(Language(), LOSS, [batch])
    with pytest.raises(DataError, match=r"A batch is a.*Specify how to split it: unpack="):
        KFAC(risk)


def test_labels_that_are_not_shifted_twice() -> None:
    """Constant sequences, other labels, and single labels say nothing; `shift=False` takes shifted labels."""
    ids = tokens()
    constant = torch.full((N, S), 3)
    few = torch.full((N, S), -100)
    few[:, 1] = ids[:, 2]
    for inputs, labels in ((ids, ids), (constant, constant), (ids, few), (ids, shifted(ids).roll(1, 0))):
        EmpiricalRisk(Language(), LOSS, [{"input_ids": inputs, "labels": labels}]).value()
    plain = EmpiricalRisk(Language(), TokenCrossEntropy(), [{"input_ids": ids, "labels": shifted(ids)}])
    right = EmpiricalRisk(Language(), LOSS, [{"input_ids": ids, "labels": ids}])
    assert plain.value() == pytest.approx(right.value(), rel=1e-14)
    torch.testing.assert_close(KFAC(plain).to_dense(), KFAC(right).to_dense())


def test_other_index_errors_are_the_models_own() -> None:
    class Broken(Language):
        def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
            raise IndexError(f"no sense in {list(input_ids.shape)}")

    with pytest.raises(IndexError, match="no sense in"):
        EmpiricalRisk(Broken(), LOSS, [{"input_ids": tokens(), "labels": tokens()}]).value()


def test_a_batch_whose_labels_are_all_ignored_changes_nothing() -> None:
    """Neither in factors, nor in averages of the optimizer."""
    ids = tokens()
    full, empty = {"input_ids": ids, "labels": ids}, {"input_ids": ids, "labels": torch.full((N, S), -100)}
    model = Language()
    alone, both = (EmpiricalRisk(model, LOSS, batches) for batches in ([full], [full, empty]))
    assert both.value() == pytest.approx(alone.value(), rel=1e-14)
    torch.testing.assert_close(KFAC(both).to_dense(), KFAC(alone).to_dense())
    f = model(ids)["logits"]
    labels = shifted(ids).flatten()
    value = nn.functional.cross_entropy(f.flatten(0, 1), labels)
    names = ["head.weight"]
    own = EmpiricalRisk(model, LOSS, [full, empty], params=names)
    torch.testing.assert_close(GGN(own).to_dense(), vec_ggn(value, f, model.head.weight))
    wrong = vec_ggn(
        nn.functional.cross_entropy(f.flatten(0, 1), labels, reduction="sum") / (N * S), f, model.head.weight
    )
    assert not torch.allclose(GGN(own).to_dense(), wrong)
    optimizer = Optimizer(model, LOSS, momentum=0.0, factors_every=1)
    for batch in (full, empty, full):
        optimizer.zero_grad()
        own_loss(model(batch["input_ids"])["logits"], batch["labels"]).backward()
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
        moved = any(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
        assert moved == (batch is full)
    assert not any(vars(optimizer.events).values())


def own_loss(f: Tensor, labels: Tensor) -> Tensor:
    """The loss as a model of Hugging Face computes it: NaN, with a gradient of zero, if no label counts."""
    return nn.functional.cross_entropy(f.flatten(0, 1), shifted(labels).flatten())


def mixtral(weight: float) -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM  # noqa: PLC0415 (slow to import)

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": C, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 3}
    config = MixtralConfig(**sizes, **heads, output_router_logits=True, router_aux_loss_coef=weight)
    return MixtralForCausalLM(config)


def test_router_losses_are_beside_the_main_one() -> None:
    """Curvature, and the value of the risk, are those of the main loss; the router's loss adds to gradients."""
    ids = tokens()
    batch = {"input_ids": ids, "labels": ids}
    factors, gates, steps = [], [], []
    for weight in (0.0, 0.5):
        model = mixtral(weight).eval()
        risk = EmpiricalRisk(model, LOSS, [batch])
        output = model(**batch)
        main = float(output.loss.detach() - weight * output.aux_loss.detach())
        assert risk.value() == pytest.approx(main, rel=1e-5)  # in single precision
        factors.append(KFAC(risk, fisher="mc").to_dense())
        optimizer = Optimizer(model.train(), LOSS, lr=0.1)
        model(**batch).loss.backward()
        gates.append(model.model.layers[0].mlp.gate.weight.grad.clone())
        optimizer.step()  # no message
        steps.append(optimizer.steps)
        assert not any(vars(optimizer.events).values())
        optimizer.close()
    torch.testing.assert_close(factors[0], factors[1])
    assert not torch.allclose(gates[0], gates[1])
    assert steps == [1, 1]


def test_models_without_logits() -> None:
    from transformers import BertConfig, BertModel  # noqa: PLC0415 (slow to import)

    config = BertConfig(vocab_size=C, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    risk = EmpiricalRisk(BertModel(config).eval(), LOSS, [{"input_ids": tokens(), "labels": tokens()}])
    with pytest.raises(ModelError, match=r"'last_hidden_state' \[5, 6, 8\], 'pooler_output'.*needs a head"):
        KFAC(risk)
