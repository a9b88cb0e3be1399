"""The exceptions of the library. Every message states the cause of an error and how to fix it.

Catch `KfsError` to catch all of them. Each class also derives from the corresponding built-in exception.
"""


class KfsError(Exception):
    """Base of all exceptions that kfs raises on purpose.

    Args:
        cause: What is wrong: what was expected and what was passed.
        way_out: How the caller can fix it.

    Example:
        >>> raise ShapeError("v has shape [3], expected [2].", "Pass a v that is shaped like b.")
        Traceback (most recent call last):
        kfs.errors.ShapeError: v has shape [3], expected [2]. Pass a v that is shaped like b.
    """

    def __init__(self, cause: str, way_out: str) -> None:
        super().__init__(cause, way_out)
        self.cause = cause
        self.way_out = way_out

    def __str__(self) -> str:
        return f"{self.cause} {self.way_out}"


class ShapeError(KfsError, ValueError):
    """A tensor's shape does not match the tensor or operator that it is combined with."""


class DtypeError(KfsError, TypeError):
    """An argument has the wrong type, or a tensor has the wrong dtype or device."""


class GraphError(KfsError, RuntimeError):
    """A tensor is not part of the required computation graph, or PyTorch records no graph."""


class FlatteningError(KfsError, ValueError):
    """A flattening other than `cvec` and `rvec` was requested."""


class LossError(KfsError, ValueError):
    """A loss function, or one of its settings, is not supported."""


class DataError(KfsError, ValueError):
    """A data set is empty, inconsistent or has no usable target."""


class ModelError(KfsError, ValueError):
    """A model lacks a requested part, or its prediction depends on more than one example."""


class UnknownNameError(ModelError, KeyError):
    """A dictionary has no item with this name."""


class UnknownAttributeError(KfsError, AttributeError):
    """A module or an object has no attribute with this name."""


class SolverError(KfsError, ArithmeticError):
    """An iterative solver cannot reach a solution."""


class StorageError(KfsError, ValueError):
    """A file cannot be written, or does not have the expected content."""


class DistributedError(KfsError, RuntimeError):
    """The processes of a group are inconsistent with each other."""


class LostRankError(DistributedError):
    """A process of a group no longer responds."""


class VerificationError(KfsError, AssertionError):
    """A numerical claim is false."""


class KfsWarning(UserWarning):
    """A requested operation changes a result in a way that the user should know about."""
