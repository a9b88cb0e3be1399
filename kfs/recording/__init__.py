"""Recording: computations on a GPU are recorded once as CUDA graphs, and replayed. What they compute is elsewhere."""

from kfs.recording.model_state import ModelState, attributes_of, has_hooks
from kfs.recording.reads import Reads
from kfs.recording.recorder import CudaRecorder, Graph, Recorder, why_not
from kfs.recording.replays import Host, Nothing, Recorded, Replays, shape_of
from kfs.recording.surroundings import is_watched, surroundings

__all__ = [
    "CudaRecorder",
    "Graph",
    "Host",
    "ModelState",
    "Nothing",
    "Reads",
    "Recorded",
    "Recorder",
    "Replays",
    "attributes_of",
    "has_hooks",
    "is_watched",
    "shape_of",
    "surroundings",
    "why_not",
]
