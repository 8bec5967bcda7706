# The dump format `lab`: STEP.lab.jsonl, one sequence a line.
#
#   {"ids": [5, 9], "learn": [0, 1], "trainer": [0, -1.2], "sampler": [0, -1.1], "prompt": 1}
#
# ids are tokens, learn the loss mask, trainer and sampler logprobs in nats, prompt its length.

import json
import re

import numpy as np

from servanda.rl.dumps.formats.base import Detection, RolloutRow, detection, files_in, importer
from servanda.rl.dumps.storage import opened

_COLUMNS = ("ids", "learn", "trainer", "sampler", "prompt")


@importer("lab")
class Lab:
    framework = "the lab's trainer"
    looks_for = "STEP.lab.jsonl"
    pickled = False  # reading it runs no code in it

    def sniff(self, folder) -> Detection | None:
        # the pattern sees "FOLDER/NAME"
        files = files_in(folder, "*.lab.jsonl", re.compile(r".*/(?P<step>\d+)\.lab\.jsonl"))
        if not files:
            return None
        with opened(files[0].path) as stream:
            columns = json.loads(stream.readline() or b"{}")
        return detection("lab", folder, files, columns, needed=_COLUMNS, read=_COLUMNS)

    def rows(self, files, refused):
        for file in files:
            with opened(file.path) as stream:
                for number, line in enumerate(stream, 1):
                    place = f"{file.name}:{number}"
                    try:
                        row = json.loads(line)
                        yield (
                            place,
                            RolloutRow(
                                token=np.array(row["ids"], dtype=np.int64),
                                mask=np.array(row["learn"], dtype=bool),
                                logp_train=np.array(row["trainer"], dtype=np.float64),
                                logp_infer=np.array(row["sampler"], dtype=np.float64),
                                prompt=row["prompt"],
                            ),
                        )
                    except (ValueError, TypeError, KeyError) as error:
                        # counted, with its first place; a row is never repaired
                        refused.add(f"the line is no sequence: {type(error).__name__}", place)
