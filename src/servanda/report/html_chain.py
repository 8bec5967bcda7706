# What a verdict implies, for the fold of the page: the chain from its certified upper ends.

from __future__ import annotations

from typing import NamedTuple

from pydantic import ValidationError

from servanda.contract import yaml_reader
from servanda.contract.model import Contract
from servanda.errors import ContractError
from servanda.judgement.bound_chain.chain import chain
from servanda.judgement.verdict import Verdict
from servanda.report.chain_text import chain_text


class Implied(NamedTuple):
    """The chain in one line, and as text."""

    summary: str
    text: str


def implied(verdict: Verdict) -> Implied | None:
    """The chain of a verdict; None where the text of its contract was not kept."""
    contract = _contract(verdict.circumstances.contract_text)
    bounds = chain(contract, verdict) if contract else None
    if bounds is None or not bounds.steps:
        return None
    summary = f"{len(bounds.steps)} numbers follow"
    if bounds.vacuous:
        summary += f", {len(bounds.vacuous)} of them vacuous"
    return Implied(summary, chain_text(bounds))


def _contract(text: str) -> Contract | None:
    """As it was judged: lint had its say when it was run."""
    if not text:
        return None
    try:
        data, _, problems = yaml_reader.read(text, "the contract of the verdict")
        return None if problems else Contract.model_validate(data)
    except (ContractError, ValidationError):
        return None
