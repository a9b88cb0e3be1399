"""What all charts share: where they are drawn, and how labels look."""

from typing import TYPE_CHECKING, Any, cast

from kfs.errors import ModelError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, LINE = "#333333", "#8a8a8a"
_LABEL = 32  # characters


def new_figure(width: float, height: float) -> "Figure":
    """Make a figure of some inches. Notebooks show it, and `matplotlib.pyplot.show()` does so in a program.

    Raises:
        ModelError: If matplotlib is missing.
    """
    try:
        from matplotlib import pyplot  # noqa: PLC0415 (optional, and slow to import)
    except ImportError as error:
        raise ModelError("matplotlib is not installed.", "Install it: pip install matplotlib.") from error
    return pyplot.figure(figsize=(width, height), layout="constrained")


def axes_of(axes: "Axes | None", width: float, height: float) -> "Axes":
    """Return the axes that were given, or those of a new figure."""
    return new_figure(width, height).subplots() if axes is None else axes


def grid(figure: "Figure", rows: int, columns: int, **options: Any) -> "list[Axes]":
    """Divide a figure, and return all axes, row by row."""
    return cast("list[Axes]", list(figure.subplots(rows, columns, squeeze=False, **options).flat))


def quiet(axes: "Axes") -> None:
    """Make labels small, and what is drawn around the data thin and grey."""
    axes.tick_params(which="both", labelsize=6.5, labelcolor=INK, color=LINE, width=0.5, length=2)
    axes.spines[:].set(color=LINE, linewidth=0.6)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set(fontsize=8, color=INK)


def open_frame(axes: "Axes") -> None:
    """Leave out the frame above and to the right."""
    quiet(axes)
    axes.spines[["top", "right"]].set_visible(False)


def short(name: str, length: int = _LABEL) -> str:
    """Shorten the first modules of a long name to their initials, and leave out its middle if it is still too long.

    Numbers stay, also at the end of a module's name: they tell layers apart.

    Example:
        >>> short("transformer.h.10.attn.c_attn.weight", 25)
        't.h.10.attn.c_attn.weight'
        >>> short("transformer.h.10.attn.c_attn.weight", 20)
        't.h.10.a.c.weight'
        >>> short("layer3.0.downsample.0.weight", 20)
        'l3.0.d.0.weight'
        >>> short("a_rather_long_name_of_one_layer", 20)
        'a_rather...one_layer'
    """
    parts = name.split(".")
    for place, part in enumerate(parts[:-1]):
        if len(".".join(parts)) <= length:
            break
        letters = part.rstrip("0123456789")
        parts[place] = letters[:1] + part[len(letters) :]
    name = ".".join(parts)
    if len(name) <= length:
        return name
    first = (length - 3) // 2
    return f"{name[:first]}...{name[len(name) - (length - 3 - first) :]}"
