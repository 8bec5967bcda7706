"""What other projects compute of a step's logprobs, each under its own interpreter.

Started by benchmarks.monitor; needs nothing of Servanda.  Each line read is one repetition of
the named row, answered by its CPU seconds.

    PYTHON benchmarks/monitor_peers.py trl|verl FOLDER
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch

Row = Callable[[], object]


def trl(train_BT: torch.Tensor, infer_BT: torch.Tensor, mask_BT: torch.Tensor) -> dict[str, Row]:
    """TRL's sampling/* metrics, in our words: its trainer has them in the middle of a method.

    The importance ratio itself is not counted, for the loss has it anyway.
    """
    ratio_BT = torch.exp((train_BT - infer_BT) * mask_BT).clamp(max=2.0)

    def difference() -> list[float]:
        apart_BT = (train_BT - infer_BT).abs()
        apart_N = apart_BT[mask_BT.bool() & ~apart_BT.isnan()]
        return [apart_N.mean().item(), apart_N.max().item()]

    def five() -> list[float]:
        ratio_N = ratio_BT[mask_BT.bool()]
        return [*difference(), *(f(ratio_N).item() for f in (torch.min, torch.mean, torch.max))]

    return {
        "sampling_logp_difference mean, max": difference,
        "and importance_sampling_ratio min, mean, max": five,
    }


def verl(train_BT: torch.Tensor, infer_BT: torch.Tensor, mask_BT: torch.Tensor) -> dict[str, Row]:
    """verl's own functions on a DataProto."""
    from omegaconf import OmegaConf
    from verl.protocol import DataProto
    from verl.trainer.ppo.rollout_corr_helper import (
        compute_rollout_corr_metrics_from_logprobs,
        compute_rollout_correction_and_add_to_batch,
    )
    from verl.utils.debug.metrics import calculate_debug_metrics

    config = OmegaConf.create({"rollout_is": "token", "rollout_is_threshold": 2.0})

    def data() -> DataProto:
        return DataProto.from_dict(
            {
                "old_log_probs": train_BT,
                "rollout_log_probs": infer_BT,
                "response_mask": mask_BT,
                "responses": mask_BT,
            }
        )

    given = data()
    return {
        "calculate_debug_metrics": lambda: calculate_debug_metrics(given),
        "compute_rollout_corr_metrics_from_logprobs": lambda: (
            compute_rollout_corr_metrics_from_logprobs(train_BT, infer_BT, mask_BT)
        ),
        "compute_rollout_correction_and_add_to_batch (token)": lambda: (
            compute_rollout_correction_and_add_to_batch(data(), config)
        ),
    }


def _version(name: str) -> str:
    """TRL's rows are expressions on tensors, which need no TRL."""
    try:
        return version(name)
    except PackageNotFoundError:
        return f"as expressions, torch {torch.__version__}"


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    arrays = [
        torch.from_numpy(np.load(folder / f"{part}.npy")) for part in ("train", "infer", "mask")
    ]
    rows = {"trl": trl, "verl": verl}[name](*arrays)
    print(f"{name} {_version(name)}", *rows, sep="\t", flush=True)
    for line in sys.stdin:
        run = rows[line.rstrip("\n")]
        began = time.process_time()
        run()
        print(time.process_time() - began, flush=True)


if __name__ == "__main__":
    main()
