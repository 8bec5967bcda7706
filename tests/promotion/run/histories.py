# A contract with every stage, and runs of it that go as far as a test needs.

from dataclasses import replace

from servanda.contract.identity import EvidenceKey
from servanda.contract.stages import course_of
from servanda.promotion.run.history import advance_run, approve_run, open_run
from servanda.promotion.state import CellResult, LegFinding, RuleAction
from tests.kit import parse

TEXT = """\
apiVersion: servanda.dev/v1alpha1
kind: KernelContract
metadata: {name: toy, version: 1.2.0}
kernels:
  train: {engine: table, model: p.json}
  infer: {engine: table, model: q.json, title: the new build}
stable: {engine: table, model: p.json}
workload: {prompts: prompts.jsonl}
statistical:
  - {id: tv, metric: tv, aggregate: mean, at_most: 0.05}
promotion:
  offline: {prompt_groups: [100, 400]}
  shadow: {prompt_groups: [100, 400], share: 0.05}
  canary: {steps: [0.1, 0.5], prompt_groups: [100, 400], dwell: 60s, approval: required}
  full: {prompt_groups: [100, 400], sample: 0.01}
  valid_for: 7d
"""
ACTOR = "Ada"
LEGS = ("offline", "shadow", "canary-1", "canary-2", "full-1")


def contract(text=TEXT):
    return parse(text, "toy.kernelcontract.yaml", engines=["table"], faults=[])[0]


def key(of=None, **changes):
    found = EvidenceKey((of or contract()).digest, "prompts", "train-1", "infer-1", "weights")
    return replace(found, **changes)


def cell(outcome="holds", **changes):
    numbers = {"value": 0.01, "low": 0.0, "high": 0.02, "limit": 0.05, "n": 900}
    if outcome == "violated":
        numbers |= {"value": 0.09, "low": 0.07, "high": 0.11}
    return CellResult("tv", "all", outcome, **{**numbers, "units": "tokens", **changes})


def finding(leg, outcome="holds", groups=128, of=None, **changes):
    """What a look finds: one cell, at the size of the first look."""
    evidence = f"{leg}-{outcome}-{groups}"
    found = LegFinding(leg, of or key(), groups, evidence, (cell(outcome),))
    return replace(found, **changes)


def paging(leg, outcome="violated"):
    """A finding for which a rule pages."""
    return replace(finding(leg, outcome), asked=(RuleAction("page", "oncall", (cell(outcome),)),))


def opened(ledger, now=0.0, of=None, kernels=None):
    made = of or contract()
    course = course_of(made)
    prints = {"infer": {"engine": "table"}}
    return open_run(ledger, made, kernels or key(made), course, prints, actor=ACTOR, now=now)


def reaching(ledger, leg, now=0.0, of=None):
    """A run that holds on every leg before one; the clock goes on by a hundred seconds a look."""
    story = opened(ledger, now, of)
    while story.leg.name != leg:
        now += 100.0
        found = finding(story.leg.name, of=story.state.key)
        story = advance_run(ledger, story, found, actor=ACTOR, now=now)
        if story.state.status == "awaiting_approval":
            story = approve_run(ledger, story, actor=ACTOR, reason="it looks well", now=now)
    return story
