# A sync by way of a checkpoint: the module is saved to a folder, and each server loads it.

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from servanda.engines.checkpoint import quiet
from servanda.engines.weight_sync import WeightSync
from servanda.errors import MeasurementError
from servanda.rl.sync_drill.servers.replicas import Replicas, opened_at
from servanda.rl.sync_drill.signals import TIMEOUT_S
from servanda.rl.sync_drill.trainee import Trainee

SHARD = "5GB"  # largest file of a checkpoint


class CheckpointSync:
    """Saves a module in its own dtype and lets every replica load it; call it after an update.

    Args:
        module: a model of transformers, which may be one of PEFT; adapters are merged.
        replicas: the servers, which must see the folder.
        folder: where the checkpoint is written, and removed again; None is the system's folder of
            temporary files.
        shard: largest file of the checkpoint, as transformers writes sizes.
    """

    def __init__(
        self,
        module: nn.Module,
        replicas: Replicas,
        folder: str | Path | None = None,
        shard: str = SHARD,
    ) -> None:
        self.module, self.replicas, self.shard = module, replicas, shard
        self.folder = None if folder is None else Path(folder)

    def __call__(self) -> None:
        with tempfile.TemporaryDirectory(prefix="servanda-sync-", dir=self.folder) as place:
            write_checkpoint(self.module, Path(place), self.shard)
            self.replicas.each(lambda replica: replica.reload(place))


def opened_for(
    dialect: str,
    module: nn.Module,
    urls: str | Sequence[str],
    folder: str | Path | None,
    *,
    served: str | None,
    key_env: str | None,
    timeout_s: float,
) -> tuple[Replicas, CheckpointSync]:
    """The servers of some URLs, of one kind, and the sync by a checkpoint that reaches them.

    Raises:
        MeasurementError: as opened_at.
    """
    servers = opened_at(urls, served=served, dialect=dialect, key_env=key_env, timeout_s=timeout_s)
    return servers, CheckpointSync(module, servers, folder)


def trainee_of_checkpoint(
    checkpoint: Path,
    urls: Sequence[str],
    *,
    folder: Path | None,
    served: str | None,
    key_env: str | None,
    timeout_s: float | None,
) -> Trainee:
    """A trainee without a trainer: a checkpoint's model, and servers that reload from disk.

    Raises:
        MeasurementError: no such checkpoint, or as opened_at.
    """
    import transformers

    try:
        with quiet():
            module = transformers.AutoModelForCausalLM.from_pretrained(
                str(checkpoint.resolve(strict=True)), dtype="auto"
            )
    except (OSError, ValueError) as error:
        raise MeasurementError(
            f"{checkpoint} is no checkpoint that transformers can load: {error}",
            hint="pass the folder that the servers were started with",
        ) from None
    servers = opened_at(
        urls,
        served=served,
        dialect=None,
        key_env=key_env,
        timeout_s=TIMEOUT_S if timeout_s is None else timeout_s,
    )
    sync = CheckpointSync(module, servers, folder)
    return Trainee(module.eval(), sync, servers.score, replicas=servers)


def write_checkpoint(module: nn.Module, folder: Path, shard: str = SHARD) -> None:
    """Write a module as a checkpoint of transformers, in safetensors and in its own dtype.

    Raises:
        MeasurementError: the module cannot be saved so.
    """
    model: Any = module
    while not hasattr(model, "save_pretrained") and hasattr(model, "_orig_mod"):
        model = model._orig_mod  # of torch.compile
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not hasattr(base, "save_pretrained"):
        raise MeasurementError(
            f"{type(module).__name__} has no save_pretrained, so no checkpoint can be written",
            hint="pass sync=: the function that your trainer calls after an update",
        )
    merged: dict[str, Tensor] | None = None
    if any(".lora_" in name for name, _ in module.named_parameters()):
        WeightSync(module, sent := _Sent())()
        merged = sent.tensors
    with quiet():
        base.save_pretrained(folder, state_dict=merged, max_shard_size=shard)


class _Sent:
    """Keeps the tensors that a sync sends."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def load(self, named: Iterable[tuple[str, Tensor]], /) -> set[str]:
        self.tensors.update(named)
        return {*self.tensors}
