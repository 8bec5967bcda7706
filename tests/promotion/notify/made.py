# Effects as a promotion makes them.

from servanda.promotion.state import Effect

DECIDED = {
    "cell": "gradient on all",
    "value": 0.0214,
    "low": 0.018,
    "high": 0.0251,
    "limit": 0.05,
    "n": 1412,
    "units": "prompt groups",
}
BODY = {
    "run": "llama-int8-3f9a",
    "contract": "llama-int8",
    "leg": "canary-2",
    "stage": "canary",
    "status": "running",
    "from": "canary-1",
    "share": 0.25,
    "mirror": 0.0,
    "sample": 0.01,
    "why": "every cell holds at 1,412 groups",
    "decided": DECIDED,
    "at": 1795267379.5,
    "turn": 4,
}


def effect(kind="notify", key="llama-int8-3f9a/4/notify", **changes):
    body = {**BODY, **changes}
    return Effect(kind, key, {name: value for name, value in body.items() if value is not ...})
