"""Optimizers that use curvature.

In the order of reading:

1. `update_rule`: the definition of a step, which runs. `step_scale`: how much of it is taken.
2. `preconditioner`: a step until the natural gradient, `Preconditioner.learn`; `kfac`: all of it, `KFAC.step`, which
   updates parameters in place by `apply`.
3. `watch`: sums from the passes of the training; `factor_graphs`: passes that are recorded on a GPU.
4. `averages`: moving averages of these sums; `inverses`: their damped inverses; `curvature`: both, for all blocks.
5. Policies: `loss_check` compares the loss with the declared one, `safety` handles what goes wrong and raises damping,
   and `quadratic_model` chooses steps and damping by the loss.
6. What users see: `options` validates settings and parameters, `report` shows costs.
7. Several processes: `across_ranks`, and `fsdp` for models that `fully_shard` has sharded.
"""

from kfs.optim.kfac import KFAC
from kfs.optim.preconditioner import Preconditioner

__all__ = ["KFAC", "Preconditioner"]
