# The verdict as JSON: every number with what it means; what does not exist is null.

from __future__ import annotations

import json

from servanda.judgement.verdict import FORMATS, Verdict


@FORMATS.register("json")
def render(verdict: Verdict) -> str:
    return json.dumps(verdict.to_dict(), indent=2, allow_nan=False)
