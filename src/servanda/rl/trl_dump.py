# TRL: every generation of a GRPOTrainer as a dump for `servanda check DIR`.
#
#     class Trainer(Dumping, GRPOTrainer): ...
#
#     Trainer(..., dump="rollouts").train()

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from servanda.errors import MeasurementError
from servanda.rl.trl_batch import column_of, groups_of, loss_mask, tokens_of
from servanda.rl.trl_setup import labels_of

if TYPE_CHECKING:
    Base: Any = object
else:
    Base = object

_NEEDED = {"sampling_per_token_logps": "sampler", "old_per_token_logps": "trainer"}


class Dumping(Base):
    """A mixin for GRPOTrainer, listed before it, that writes all its sequences to a folder.

    Without TRL's own logprobs before the update nothing could be compared, so this is an error;
    Monitor(dump=) has those of the loss.

    Args:
        dump: the folder, which `servanda check` reads.
        slices: as of Monitored.

    Raises:
        MeasurementError: a generation has no logprobs of the trainer or of the sampler.
    """

    def __init__(
        self,
        *args: Any,
        dump: str | Path,
        slices: Sequence[str] | Mapping[str, str] = (),
        **kwargs: Any,
    ) -> None:
        self.dump = Path(dump)
        self._written = (0, 0)  # a step, and its generations so far
        self.slices = dict(
            slices if isinstance(slices, Mapping) else zip(slices, slices, strict=True)
        )
        super().__init__(*args, **kwargs)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        out = super()._generate_and_score_completions(inputs)
        if self.model.training:  # an evaluation is not trained on
            self._write(inputs, out)
        return out

    def _write(self, inputs: Sequence[Mapping[str, Any]], out: Mapping[str, Any]) -> None:
        from servanda.rl.dumps.formats.parquet import Writer

        mask_BT = loss_mask(out)
        for name, side in _NEEDED.items():
            if name not in out or bool(out[name][mask_BT.bool()].isnan().all()):
                raise MeasurementError(
                    f"TRL's batch has no logprobs of the {side} ({name}): a dump would compare "
                    "nothing",
                    hint="TRL has both with vLLM and its importance-sampling correction; otherwise "
                    "use Monitored with Monitor(..., dump=)",
                )
        token_BT = tokens_of(out)
        labels = {name: column_of(inputs, column) for name, column in self.slices.items()}
        present_BT = token_BT >= 0
        present_BT[:, -mask_BT.shape[1] :] &= out["completion_mask"].bool()
        step = int(self.state.global_step) + 1  # as TRL logs it
        before = self._written[1] if self._written[0] == step else 0
        self._written = (step, before + 1)
        ranks, rank = self.accelerator.num_processes, self.accelerator.process_index
        Writer(self.dump, rank=rank + ranks * before).step(  # a file of each generation
            step,
            token_BT,
            mask_BT,
            out["old_per_token_logps"],
            out["sampling_per_token_logps"],
            present=present_BT,
            groups=groups_of(out),
            labels=labels_of(self, len(mask_BT)) | labels,
            advantages=out["advantages"],
        )
