import pytest
import torch
from torch import Tensor, nn

from kfs.basics.forward_pass import output_and_intermediates
from kfs.basics.jacobian_products import vjp
from kfs.errors import GraphError, ModelError
from tests.basics.cases import assert_close


class Twice(nn.Module):
    """Has layers that are called twice, or with several tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.unused = nn.Linear(2, 2)
        self.by_keyword = nn.Linear(2, 2)
        self.two_in = nn.Bilinear(2, 2, 2)
        self.two_out = nn.RNN(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.by_keyword(input=self.layer(self.layer(x)))
        output, _ = self.two_out(self.two_in(result, result))
        return output  # type: ignore[no-any-return]


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.layer(x)
        raise RuntimeError("broken on purpose")


def num_hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_intermediates_are_nodes_of_the_predictions_graph() -> None:
    last = nn.Linear(4, 2)
    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Tanh(), last)).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    output, layers = output_and_intermediates(model, x, ["0", "1.1"])
    assert list(layers) == ["0", "1.1"]
    assert_close(output, model(x))
    assert layers["0"].input is x
    assert layers["1.1"].output is output
    assert_close(layers["1.1"].input, torch.tanh(layers["0"].output))

    # The gradient through the graph equals the one by hand: z -> W tanh(z).
    v = torch.randn_like(output)
    by_hand = (v @ last.weight) * (1 - torch.tanh(layers["0"].output) ** 2)
    assert_close(vjp(output, layers["0"].output, v), by_hand.detach())
    assert num_hooks(model) == 0


def test_all_layers_and_the_model_itself_can_be_watched() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    output, layers = output_and_intermediates(model, torch.rand(1, 3), (name for name, _ in model.named_modules()))
    assert layers[""].output is output
    output, layers = output_and_intermediates(model, torch.rand(1, 3), [])
    assert layers == {}


def test_hooks_are_removed_when_the_forward_pass_raises() -> None:
    model = Broken()
    mine = model.layer.register_forward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="broken on purpose"):
        output_and_intermediates(model, torch.rand(1, 2), ["layer"])
    assert num_hooks(model) == 1
    mine.remove()


def test_names_are_a_list_of_names_each_wanted_once() -> None:
    layer = nn.Linear(2, 2)
    model = nn.Sequential(layer, nn.Identity())
    with pytest.raises(ModelError, match=r"string '0'\. Pass a list of names: \['0'\]"):
        output_and_intermediates(model, torch.rand(1, 2), "0")
    _, layers = output_and_intermediates(model, torch.rand(1, 2), ["0", "0"])
    assert list(layers) == ["0"]
    model.add_module("again", nn.Identity())
    model.alias = layer  # a second name for the same module, which is then called twice
    with pytest.raises(ModelError, match="'alias' was called more than once"):
        output_and_intermediates(model, torch.rand(1, 2), ["alias"])
    with torch.inference_mode(), pytest.raises(GraphError, match="inference_mode"):
        output_and_intermediates(model, torch.rand(1, 2), ["0"])


def test_unknown_names_are_refused_before_anything_runs() -> None:
    model = Broken()
    with pytest.raises(ModelError, match=r"no layers named \['fc'\]\. Choose from \['layer'\]"):
        output_and_intermediates(model, torch.rand(1, 2), ["layer", "fc"])
    assert num_hooks(model) == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("layer", "called more than once"),
        ("unused", "was not called"),
        ("by_keyword", "one tensor, passed by position"),
        ("two_in", "one tensor, passed by position"),
        ("two_out", "one tensor, passed by position"),
    ],
)
def test_layers_without_one_input_and_output_are_refused(name: str, message: str) -> None:
    model = Twice()
    with pytest.raises(ModelError, match=message):
        output_and_intermediates(model, torch.rand(1, 2), [name])
    assert num_hooks(model) == 0


@pytest.mark.parametrize("name", ["0", "1"])
def test_overwritten_tensors_are_refused(name: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True), nn.Linear(2, 2))
    with pytest.raises(ModelError, match=r"overwritten .*inplace=False"):
        output_and_intermediates(model, torch.rand(1, 2), [name])
    output_and_intermediates(model, torch.rand(1, 2), ["2"])  # this layer is not affected


def test_a_layer_that_returns_its_input_is_fine() -> None:
    _, layers = output_and_intermediates(nn.Sequential(nn.Identity()), torch.rand(1, 2), ["0"])
    assert layers["0"].input is layers["0"].output
