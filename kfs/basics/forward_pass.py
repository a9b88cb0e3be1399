r"""The forward pass, with a look inside.

A feed-forward network is a chain of layers. Its evaluation produces intermediate features,

$$
x^{(0)} = x, \qquad x^{(l)} = f^{(l)}(x^{(l-1)}, \theta^{(l)}), \qquad x^{(L)} = f(x, \theta).
$$

We call $x^{(l-1)}$ the *input* and $x^{(l)}$ the *output* of layer $l$. KFAC needs both, for every layer with
parameters, and as nodes of the same computation graph as the network's prediction, so that we can differentiate the
prediction with respect to a layer's output. PyTorch's forward hooks receive them while the network runs.

This works for modules that are called once, with one input tensor and one output tensor. Otherwise (a module used
twice, an activation that overwrites its input) the tensors would silently be wrong, so an error is raised.

Implements: intermediate features by forward hooks (chapter 2, "Deep Neural Networks").
"""

from collections.abc import Iterable
from contextlib import ExitStack
from typing import NamedTuple

from torch import Tensor
from torch.nn import Module

from kfs.errors import ModelError
from kfs.problem.isolation import check_no_inference_mode


class Intermediates(NamedTuple):
    """Input and output of a layer, as nodes of the computation graph."""

    input: Tensor
    output: Tensor


def output_and_intermediates(model: Module, x: Tensor, names: Iterable[str]) -> tuple[Tensor, dict[str, Intermediates]]:
    """Evaluate a model and keep the inputs and outputs of some of its layers.

    Args:
        model: The network.
        x: Its input.
        names: Names of the layers to watch, as in `model.named_modules()`.

    Returns:
        The model's output, and a dictionary from the names to the layers' `(input, output)`.

    Raises:
        ModelError: If a name is unknown, or if its layer is not called exactly once with one tensor in and one tensor
            out, or if one of the two is overwritten later.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU())
        >>> output, layers = output_and_intermediates(model, torch.rand(5, 3), ["0"])
        >>> layers["0"].input.shape, layers["0"].output.shape
        (torch.Size([5, 3]), torch.Size([5, 2]))
    """
    check_no_inference_mode()
    if isinstance(names, str):
        raise ModelError(f"names is the string {names!r}.", f"Pass a list of names: [{names!r}].")
    modules = dict(model.named_modules(remove_duplicate=False))
    names = list(dict.fromkeys(names))
    unknown = [name for name in names if name not in modules]
    if unknown:
        raise ModelError(
            f"The model has no layers named {unknown}.",
            f"Choose from {[name for name in modules if name]}.",
        )

    seen: dict[str, Intermediates] = {}
    versions: dict[str, tuple[int, ...]] = {}  # PyTorch counts in-place changes of a tensor in its version
    with ExitStack() as hooks:  # removes every hook, also when the forward pass raises
        for name in names:

            def before(_module: Module, inputs: tuple[object, ...], name: str = name) -> None:
                versions[name] = tuple(x._version for x in inputs if isinstance(x, Tensor))

            def after(_module: Module, inputs: tuple[object, ...], output: object, name: str = name) -> None:
                seen[name] = layer = _one_in_one_out(name, inputs, output, called_before=name in seen)
                versions[name] += (layer.output._version,)

            hooks.callback(modules[name].register_forward_pre_hook(before).remove)
            hooks.callback(modules[name].register_forward_hook(after).remove)
        result = model(x)

    for name in names:
        if name not in seen:
            raise ModelError(
                f"Layer {name!r} was not called in the forward pass.",
                "Leave it out of names, or check that the model calls the module itself, not only its parameters.",
            )
        if versions[name] != (seen[name].input._version, seen[name].output._version):
            raise ModelError(
                f"The input or output of layer {name!r} was overwritten by an in-place operation.",
                "Use the out-of-place version, e.g. ReLU(inplace=False).",
            )
    return result, seen


def _one_in_one_out(name: str, inputs: tuple[object, ...], output: object, called_before: bool) -> Intermediates:
    """Return the layer's input and output; raise an error unless there is one of each."""
    if called_before:
        raise ModelError(
            f"Layer {name!r} was called more than once in the forward pass, so it has no one input and output.",
            "Watch the modules that call it instead, or give every call a module of its own.",
        )
    if len(inputs) != 1 or not isinstance(inputs[0], Tensor) or not isinstance(output, Tensor):
        raise ModelError(
            f"Layer {name!r} does not map one tensor, passed by position, to one tensor.",
            "Watch the layers inside of it, which do.",
        )
    return Intermediates(inputs[0], output)


if __name__ == "__main__":
    import torch
    from torch.nn import Linear, ReLU, Sequential

    from kfs.verification import verify, verify_that

    torch.manual_seed(0)
    model = Sequential(Linear(5, 4), ReLU(), Linear(4, 3)).double()
    x = torch.randn(7, 5, dtype=torch.float64)
    output, layers = output_and_intermediates(model, x, ["0", "1", "2"])

    verify("the first layer's input is the data", layers["0"].input, x)
    verify("a layer's output is the next layer's input", layers["0"].output, layers["1"].input)
    verify("the last layer's output is the prediction", layers["2"].output, output)
    verify("a layer maps its input to its output", model[2](layers["2"].input), layers["2"].output)
    hooks_left = sum(len(module._forward_hooks) for module in model.modules())
    verify_that("no hook is left on the model", hooks_left == 0)
