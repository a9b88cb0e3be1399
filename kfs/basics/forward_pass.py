r"""The forward pass, with a look inside.

A feed-forward network is a chain of layers. Its evaluation produces intermediate
features,

$$
x^{(0)} = x, \qquad x^{(l)} = f^{(l)}(x^{(l-1)}, \theta^{(l)}),
\qquad x^{(L)} = f(x, \theta).
$$

We call $x^{(l-1)}$ the *input* and $x^{(l)}$ the *output* of layer $l$. KFAC needs
both, for every layer with parameters, and as nodes of the same computation graph as the
network's prediction, so that we can differentiate the prediction with respect to a
layer's output. PyTorch's forward hooks receive them while the network runs.

This works for modules that are called once, with one input tensor and one output
tensor. Otherwise (a module used twice, an activation that overwrites its input) the
tensors would silently be wrong, so an error is raised.

Implements: intermediate features by forward hooks (chapter 2, "Deep Neural Networks").
"""

from collections.abc import Iterable
from contextlib import ExitStack
from typing import NamedTuple

from torch import Tensor
from torch.nn import Module

from kfs.basics._checks import called_once, named_layers


class Intermediates(NamedTuple):
    """Input and output of a layer, as nodes of the computation graph."""

    input: Tensor
    output: Tensor


def output_and_intermediates(
    model: Module, x: Tensor, names: Iterable[str]
) -> tuple[Tensor, dict[str, Intermediates]]:
    """Evaluate a model and keep the inputs and outputs of some of its layers.

    Args:
        model: The network.
        x: Its input.
        names: Names of the layers to watch, as in `model.named_modules()`.

    Returns:
        The model's output, and a dictionary from the names to the layers'
        `(input, output)`.

    Raises:
        ModelError: If a name is unknown, or if its layer is not called exactly once
            with one tensor in and one tensor out, or if one of the two is overwritten
            later.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU())
        >>> output, layers = output_and_intermediates(model, torch.rand(5, 3), ["0"])
        >>> layers["0"].input.shape, layers["0"].output.shape
        (torch.Size([5, 3]), torch.Size([5, 2]))
    """
    layers = named_layers(model, names)
    seen: dict[str, Intermediates] = {}
    # Leaving the stack removes every hook, also when the forward pass raises.
    with called_once(layers), ExitStack() as hooks:
        for name, layer in layers.items():

            def keep(_: Module, x: tuple[Tensor], y: Tensor, name: str = name) -> None:
                seen[name] = Intermediates(*x, y)

            hooks.callback(layer.register_forward_hook(keep).remove)
        output = model(x)
    return output, seen


if __name__ == "__main__":
    import torch
    from torch.nn import Linear, ReLU, Sequential

    from kfs.verification import verify, verify_that

    torch.manual_seed(0)
    model = Sequential(Linear(5, 4), ReLU(), Linear(4, 3)).double()
    x = torch.randn(7, 5, dtype=torch.float64)
    output, layers = output_and_intermediates(model, x, ["0", "1", "2"])

    verify("the first layer's input is the data", layers["0"].input, x)
    verify(
        "a layer's output is the next layer's input",
        layers["0"].output,
        layers["1"].input,
    )
    verify("the last layer's output is the prediction", layers["2"].output, output)
    verify(
        "a layer maps its input to its output",
        model[2](layers["2"].input),
        layers["2"].output,
    )
    hooks_left = sum(len(module._forward_hooks) for module in model.modules())
    verify_that("no hook is left on the model", hooks_left == 0)
