"""The exceptions of the library. Every message states a cause and a way out.

Catch `KfsError` for all of them. Each is also the built-in exception that one would expect in its place.
"""


class KfsError(Exception):
    """Base of all exceptions that kfs raises on purpose.

    Args:
        cause: What is wrong: what was expected and what came.
        way_out: What the caller can do about it.

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
    """A tensor's shape does not fit what it is combined with."""


class DtypeError(KfsError, TypeError):
    """An argument's type, or a tensor's dtype or device, does not fit."""


class GraphError(KfsError, RuntimeError):
    """A tensor is not where it should be in the computation graph."""


class FlatteningError(KfsError, ValueError):
    """A flattening other than `cvec` and `rvec` was asked for."""


class LossError(KfsError, ValueError):
    """A loss function, or a setting of it, is not supported."""


class DataError(KfsError, ValueError):
    """A data set is empty, inconsistent or holds no usable target."""


class ModelError(KfsError, ValueError):
    """A model does not have what was asked for, or is not a function of one example."""


class UnknownNameError(ModelError, KeyError):
    """A dictionary has no item of this name."""


class UnknownAttributeError(KfsError, AttributeError):
    """The package, or an object, has no such name."""


class SolverError(KfsError, ArithmeticError):
    """An iteration cannot reach a solution."""


class StorageError(KfsError, ValueError):
    """A file cannot be written, or is not what it should be."""


class DistributedError(KfsError, RuntimeError):
    """Processes of a group do not fit together."""


class LostRankError(DistributedError):
    """A process of a group does not answer any more."""


class VerificationError(KfsError, AssertionError):
    """A numerical claim turned out to be false."""


class KfsWarning(UserWarning):
    """Something was done as asked for that changes a result, and is worth knowing."""
