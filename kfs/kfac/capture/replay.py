"""Which passes for factors are recorded on a GPU. How they are recorded and replayed is in `kfs.recording`."""

import logging

import torch
from torch.nn import Module

from kfs.kfac.settings import Settings
from kfs.recording import CudaRecorder, Recorder
from kfs.risk import EmpiricalRisk

log = logging.getLogger("kfs.kfac")


def recorder_for(risk: EmpiricalRisk, settings: Settings) -> Recorder | None:
    """Return what records passes; `None` if they are to run as they are."""
    if not settings.replay or risk.device.type != "cuda":
        return None
    model = risk.model.parameters() if isinstance(risk.model, Module) else ()  # pragma: no cover (tested on a GPU)
    devices = {t.device for t in (*risk.params.values(), *model)}  # pragma: no cover
    sums = risk.device if settings.factor_device is None else torch.device(settings.factor_device)  # pragma: no cover
    if len(devices) > 1 or sums.type != "cuda":  # pragma: no cover
        log.info("Passes over batches are not replayed as CUDA graphs: model and sums are on several devices.")
        return None
    return CudaRecorder(risk.device, settings.memory)  # pragma: no cover
