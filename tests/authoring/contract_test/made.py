# Small contracts and their tests, in a folder.

from pathlib import Path

from servanda.authoring.contract_test.files import prepare_tests
from tests import kit

SLICES = """\
slices:
  - {name: first, split: labels.first}
  - {name: late, match: {context.position: {gte: 4}}}
  - {name: unsure, match: {context.entropy_nats: {gte: 3.0}}}
  - {name: long, match: {request.prompt_tokens: {gte: 100}}}
"""
HEAD = """\
apiVersion: servanda.dev/v1alpha1
kind: ContractTest
metadata: {{name: toy-tests}}
contract: {contract}
seed: {seed}
{top}
cases:
"""


def written(folder, cases, *, seed=7, top="", contract=None, **more):
    """A contract and its tests in a folder; the path of the tests."""
    folder = Path(folder)
    if contract is None:
        path, _ = kit.write(folder, **{"slices": SLICES, **more})
        contract = path.name
    file = folder / "toy.kerneltest.yaml"
    file.write_text(HEAD.format(contract=contract, seed=seed, top=top) + cases)
    return file


def rehearsed(folder, cases, **more):
    """What the only test of a file found."""
    (one,) = prepare_tests(written(folder, cases, **more))
    return one.run()


def case(traffic, *expect, name="a case", more=""):
    """One case of a test, as YAML; `traffic` may be none."""
    lines = [f"  - name: {name}"]
    lines += [f"    traffic: {traffic}"] if traffic else []
    lines += [f"    {line}" for line in more.splitlines()]
    return "\n".join([*lines, "    expect:", *(f"      - {e}" for e in expect)]) + "\n"
