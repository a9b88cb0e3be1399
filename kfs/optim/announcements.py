"""What users should know about their model, said once."""

import warnings
from collections.abc import Iterable, Mapping

from kfs.errors import KfsWarning
from kfs.kfac.blocks import Block
from kfs.kfac.settings import Settings


def announce(uncovered: Mapping[str, str], blocks: Iterable[Block], settings: Settings) -> None:
    """Warn about parameters that KFAC does not cover, and about factors that keep their diagonal only.

    Args:
        uncovered: By parameter name, why.
        blocks: Those that are new.
        settings: Say which factors are too wide.
    """
    if uncovered:
        listed = "; ".join(f"{name!r}: {why}" for name, why in list(uncovered.items())[:5])
        more = f"; and {len(uncovered) - 5} more" if len(uncovered) > 5 else ""
        text = f"KFAC does not cover some parameters, which are trained by AdamW ({listed}{more})."
        warnings.warn(text, KfsWarning, stacklevel=5)
    sizes = [(f"{b.name}.{side}", getattr(b, side).shape[-1], d) for b in blocks for side, d in b.diagonal.items()]
    wide = [f"{name} ({size})" for name, size, diagonal in sizes if diagonal and settings.is_diagonal(size)]
    if wide:
        text = f"Factors wider than max_dim={settings.max_dim} keep their diagonal only: {', '.join(wide)}."
        warnings.warn(text, KfsWarning, stacklevel=5)
