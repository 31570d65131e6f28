"""Lightning: strategies for ``Trainer`` and ``Fabric`` that shard the model.

.. code-block:: python

    from zeroshard.integrations.lightning import ZeroshardStrategy

    trainer = lightning.Trainer(strategy=ZeroshardStrategy(stage=3, offload="cpu"), ...)  # or "zeroshard_stage_3"

    fabric = lightning.Fabric(strategy=ZeroshardFabricStrategy(stage=3), ...)
    model, optimizer = fabric.setup(model, optimizer)

In everything but the model they are Lightning's strategies for DistributedDataParallel: processes, process group,
samplers and logging remain Lightning's. The package ``pytorch_lightning`` has classes of its own. Its strategy is
``class Mine(ZeroshardStrategyMixin, pytorch_lightning.strategies.DDPStrategy): ...``.
"""

from ..requirement import require

require("lightning", "zeroshard.integrations.lightning", "lightning")  # before what needs it is imported

from .fabric import ZeroshardFabricStrategy  # noqa: E402
from .trainer import ZeroshardStrategy, ZeroshardStrategyMixin  # noqa: E402

__all__ = ["ZeroshardFabricStrategy", "ZeroshardStrategy", "ZeroshardStrategyMixin"]
