# A float32 trainer, its bfloat16 engine, and the sync between them; `broken` leaves an MLP out.

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from servanda.contract.model import Kernel
from servanda.engines.faults.sync import SYNC_FAULTS
from servanda.engines.transformers import TransformersEngine
from servanda.engines.weight_sync import WeightSync
from servanda.rl import Trainee
from servanda.rl.sync_drill.trainee import forward_logprobs


def healthy(sync: type[WeightSync] = WeightSync) -> Trainee:
    disable_progress_bar()
    model = "models/tiny-lm"
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    engine = TransformersEngine(Kernel(engine="transformers", model=model, dtype="bfloat16"))
    score = lambda rows: forward_logprobs(engine.model, rows)  # noqa: E731
    return Trainee(module, sync(module, engine), score)


def broken() -> Trainee:
    return healthy(SYNC_FAULTS["one_mlp"].inject(WeightSync, 1))
