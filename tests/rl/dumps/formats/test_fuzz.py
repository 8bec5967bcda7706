# Broken dumps: whatever is in a file, it is refused with a place or read to the letter.

import json
import re
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from servanda.errors import ServandaError
from servanda.rl.dumps.checks import Soundness
from servanda.rl.dumps.formats import open_dump
from servanda.rl.dumps.formats.parquet import Writer
from tests.drawn import examples
from tests.rl.dumps.formats.made import EXPECTED, nemo, prime
from tests.rl.dumps.formats.test_own import ragged

FEW = EXPECTED[:3]
_NUMBER = re.compile(rb"-?(?:Infinity|NaN|\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)")
_ODD = [
    b"null", b"true", b"NaN", b"-Infinity", b"1e999", b"9" * 400, b"-1", b"0", b"1.5", b'"a"',
    b"[]", b"{}", b"[[[[1]]]]", b"18446744073709551616", b'"\xff"', b"[" * 3000, b"\x00",
    b"1e-400", b"-0.0",
]  # fmt: skip


def one(places, draw):
    places = [*places]
    if not places:
        raise LookupError
    return places[draw(st.integers(0, len(places) - 1))]


def drop_key(line, draw):
    at = one(re.finditer(rb'"(\w+)": ?', line), draw)
    return line[: at.start(1)] + b"x" + line[at.end(1) :]


def replace_value(line, draw):
    at = one(_NUMBER.finditer(line), draw)
    return line[: at.start()] + draw(st.sampled_from(_ODD)) + line[at.end() :]


def replace_column(line, draw):
    at = one(re.finditer(rb": ?(\[+[^\[\]]*\]+)", line), draw)
    return line[: at.start(1)] + draw(st.sampled_from(_ODD)) + line[at.end(1) :]


def drop_value(line, draw):
    at = one(re.finditer(rb"-?[\d.e-]+, ?", line), draw)
    return line[: at.start()] + line[at.end() :]


def nest(line, draw):
    at = one(re.finditer(rb": ?(\[+[^\[\]]*\]+)", line), draw)
    depth = draw(st.integers(1, 3))
    return line[: at.start(1)] + b"[" * depth + at[1] + b"]" * depth + line[at.end(1) :]


def cut(line, draw):
    return line[: draw(st.integers(0, len(line)))]


def byte(line, draw):
    at = one(range(len(line)), draw)
    return line[:at] + bytes([draw(st.integers(0, 255))]) + line[at + 1 :]


MUTATIONS = [drop_key, replace_value, replace_column, drop_value, nest, cut, byte]
LAYOUTS = {"nemo": nemo, "prime-rl": prime}


def original(name):
    with tempfile.TemporaryDirectory() as folder:
        return LAYOUTS[name](folder, FEW).read_bytes()


ORIGINAL = {name: original(name) for name in LAYOUTS}


@st.composite
def broken(draw):
    """A format and the bytes of a file of it, mutated once to three times."""
    name = draw(st.sampled_from(sorted(LAYOUTS)))
    lines = ORIGINAL[name].splitlines(keepends=True)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(lines) - 1))
        mutate = draw(st.sampled_from(MUTATIONS))
        try:
            lines[at] = mutate(lines[at], draw)
        except LookupError:
            continue  # the line has no such place any more
    return name, b"".join(lines)


def numbers_of(text):
    """Every number that the bytes of a file can be read as."""
    found = set()
    for match in _NUMBER.findall(text):
        found.add(float(match.decode().replace("Infinity", "inf")))
    return found


def holds_only(chunks, allowed):
    """The oracle: a number that came out stood in the file."""
    for chunk in chunks:
        columns = [chunk.logp_train_N, chunk.logp_infer_N, chunk.token_N]
        columns += [*chunk.per_sequence.values(), *chunk.per_token.values()]
        for column in columns:
            values = np.asarray(column, dtype=float)
            known = {float(v) for v in values if not np.isnan(v)}
            assert known <= allowed, known - allowed
        soundness = Soundness()
        soundness.add(chunk)
        soundness.findings()


def refused_or_to_the_letter(name, data):
    """A broken dump in the layout of a framework is refused by its place, or makes nothing up."""
    folder = Path(tempfile.mkdtemp())
    try:
        path = LAYOUTS[name](folder, FEW)
        path.write_bytes(data)
        chunks = []
        try:
            dump = open_dump(folder)
            chunks.extend(dump.read())
            assert dump.refused.accepted == sum(len(chunk) for chunk in chunks)
        except ServandaError as error:
            assert path.name in str(error) or "dump" in str(error)
        holds_only(chunks, numbers_of(data) | {0.0})
    finally:
        shutil.rmtree(folder)


@settings(max_examples=examples(200))
@given(broken())
def test_a_broken_dump_is_refused_or_read_to_the_letter(case):
    refused_or_to_the_letter(*case)


@pytest.mark.parametrize("seed", range(4))
def test_a_parquet_file_with_bytes_changed_raises_nothing_of_its_own(tmp_path, seed):
    rng = np.random.default_rng(seed)
    path = Writer(tmp_path).step(1, **ragged())
    good = path.read_bytes()
    for _ in range(25):
        data = bytearray(good)
        for at in rng.integers(0, len(data), 3):
            data[at] = rng.integers(0, 256)
        path.write_bytes(
            bytes(data[: rng.integers(1, len(data) + 1)] if rng.random() < 0.2 else data)
        )
        try:
            list(open_dump(tmp_path).read())
        except ServandaError as error:
            assert "step_000001.rank0.parquet" in str(error) or str(tmp_path) in str(error)


@pytest.mark.slow
def test_the_mutations_are_not_in_vain():
    """Of 300 broken dumps some are refused, some are read in part, and some are cut off."""
    outcomes = set()

    @settings(max_examples=300, derandomize=True)
    @given(broken())
    def each(case):
        name, data = case
        with tempfile.TemporaryDirectory() as folder:
            LAYOUTS[name](folder, FEW).write_bytes(data)
            try:
                dump = open_dump(folder)
                list(dump.read())
                outcomes.add("refused" if dump.refused else "read")
            except ServandaError as error:
                outcomes.add(type(error).__name__)

    each()
    assert outcomes >= {"refused", "read", "EvidenceError", "ContractError"}


def test_a_nesting_of_a_hundred_thousand_is_a_broken_line(tmp_path):
    path = nemo(tmp_path)
    row = json.loads(path.read_text().splitlines()[0])
    deep = json.dumps(row).replace('"idx": 0', '"idx": ' + "[" * 100_000 + "]" * 100_000)
    path.write_text(path.read_text() + deep + "\n")
    dump = open_dump(tmp_path)
    read = sum(len(chunk) for chunk in dump.read())
    assert read + dump.refused.rows == 5
