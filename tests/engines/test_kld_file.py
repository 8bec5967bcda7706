# Base files of llama.cpp against a reader and a writer that go one number at a time.

from __future__ import annotations

import json
import math
import struct

import numpy as np
import pytest

from servanda.contract.model import Kernel
from servanda.engines.kld_file import read_kld, write_kld
from servanda.engines.table import TableEngine
from servanda.errors import MeasurementError
from servanda.runner.kld import compared_kld, written_kld
from tests import kit
from tests.test_command_line import servanda

SIZES = pytest.mark.parametrize(("vocabulary", "width"), [(5, 8), (6, 9)])  # odd, and even


def texts_and_logits(vocabulary, width, texts=3, seed=0):
    rng = np.random.default_rng(seed)
    token_CT = rng.integers(vocabulary, size=(texts, width)).astype(np.int32)
    scored = width - 1 - width // 2
    logits = rng.normal(size=(texts, scored, vocabulary)).astype(np.float32) * 4
    logits[0, 0] = 1.0  # all are equal
    logits[1, 0, 2] = -300.0  # farther away than a row holds
    return token_CT, logits


def by_the_source(path):
    """(tokens, log probabilities), as the C++ reads them."""
    data = path.read_bytes()
    assert data[:8] == b"_logits_"
    width, vocabulary, texts = struct.unpack_from("<3i", data, 8)
    tokens = struct.unpack_from(f"<{width * texts}i", data, 20)
    at, rows = 20 + 4 * width * texts, []
    size = 2 * ((vocabulary + 1) // 2) + 4
    while at < len(data):
        scale, least = struct.unpack_from("<2f", data, at)
        codes = struct.unpack_from(f"<{vocabulary}H", data, at + 8)
        rows.append([scale * code + least for code in codes])
        at += 2 * size
    return tokens, rows


def written_by_the_source(path, token_CT, logits):
    texts, width = token_CT.shape
    vocabulary = logits.shape[-1]
    data = b"_logits_" + struct.pack("<3i", width, vocabulary, texts)
    data += struct.pack(f"<{width * texts}i", *token_CT.ravel().tolist())
    for row in logits.reshape(-1, vocabulary).tolist():
        most = max(row)
        least = max(min(row), most - 16)
        log_sum = math.log(sum(math.exp(x - most) for x in row))
        scale = (most - least) / 65535
        data += struct.pack("<2f", scale, least - most - log_sum)
        codes = [round((x - least) / scale) if scale and x > least else 0 for x in row]
        data += struct.pack(f"<{vocabulary}H", *codes)
        data += b"\0\0" * (vocabulary % 2)
    path.write_bytes(data)


def logp_of(logits):
    logits = logits.astype(np.float64)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@SIZES
def test_what_is_written_is_read_by_the_rules_of_the_source(tmp_path, vocabulary, width):
    token_CT, logits = texts_and_logits(vocabulary, width)

    write_kld(tmp_path / "a.kld", token_CT, logits)

    tokens, rows = by_the_source(tmp_path / "a.kld")
    assert list(tokens) == token_CT.ravel().tolist()
    expected = logp_of(logits).reshape(-1, vocabulary)
    expected = np.maximum(expected, expected.max(axis=-1, keepdims=True) - 16)
    np.testing.assert_allclose(rows, expected, atol=16 / 65535)


@SIZES
def test_what_the_source_writes_is_read(tmp_path, vocabulary, width):
    token_CT, logits = texts_and_logits(vocabulary, width)
    written_by_the_source(tmp_path / "a.kld", token_CT, logits)

    base = read_kld(tmp_path / "a.kld")

    assert base.token_CT.tolist() == token_CT.tolist()
    _, rows = by_the_source(tmp_path / "a.kld")
    np.testing.assert_allclose(np.concatenate(list(base.rows())), rows, rtol=1e-6, atol=1e-6)


def tables(tmp_path):
    p = {"": kit.BASE, "a": [0.1, 0.2, 0.3, 0.2, 0.2]}
    q = {"": kit.moved(kit.BASE, 0.1), "a": [0.2, 0.1, 0.3, 0.2, 0.2]}
    for name, rows in (("p.json", p), ("q.json", q)):
        kit.table(tmp_path, name, rows)
    engines = [TableEngine(Kernel(engine="table", model=str(tmp_path / f"{n}.json"))) for n in "pq"]
    return engines, p, q


def test_the_statistics_are_sums_over_the_texts(tmp_path):
    (engine_p, engine_q), p, q = tables(tmp_path)
    token_CT = np.array([[0, 1, 2, 0, 3, 1, 0, 2], [3, 3, 0, 0, 1, 0, 2, 1]], dtype=np.int32)
    written_kld(tmp_path / "p.kld", engine_p, token_CT.tolist(), width=8, bos=None, batch_size=1)

    found = compared_kld(read_kld(tmp_path / "p.kld"), engine_q, bos=None, batch_size=2)

    kld, tv, ratio = [], [], []
    for text in token_CT.tolist():
        for at in range(4, 7):
            row = "a" if text[at] == 0 else ""
            pairs = list(zip(p[row], q[row], strict=True))
            kld.append(sum(x * math.log(x / y) for x, y in pairs))
            tv.append(sum(abs(x - y) for x, y in pairs) / 2)
            x, y = pairs[text[at + 1]]
            ratio.append(math.log(x / y))
    assert found.positions == len(kld) == 6
    assert found.kld_nats == pytest.approx(np.mean(kld), abs=1e-4)
    assert found.kld_error_nats == pytest.approx(np.std(kld, ddof=1) / math.sqrt(6), abs=1e-4)
    assert found.tv == pytest.approx(np.mean(tv), abs=1e-4)
    assert found.log_ppl_ratio_nats == pytest.approx(np.mean(ratio), abs=1e-4)


def test_the_token_that_begins_a_text_is_fed_in_the_place_of_the_first(tmp_path):
    fed = []

    class Listening(TableEngine):
        def logits(self, batch, path):
            fed.append((batch.prompts, batch.continuations))
            return super().logits(batch, path)

    tables(tmp_path)
    engine = Listening(Kernel(engine="table", model=str(tmp_path / "p.json")))
    options = {"width": 6, "batch_size": 8}

    written_kld(tmp_path / "a.kld", engine, [[1, 2, 3, 1, 2, 3]], bos=0, **options)

    assert fed == [(((0, 2, 3, 1),), ((2, 3),))]
    assert read_kld(tmp_path / "a.kld").token_CT.tolist() == [[1, 2, 3, 1, 2, 3]]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"_other__" + data[8:], "is no base file of llama.cpp"),
        (lambda data: data[:14], "ends, or is damaged, in its header"),
        (lambda data: data[:8] + struct.pack("<i", -1) + data[12:], "is damaged, in its header"),
        (lambda data: data[:-2], "bytes, and 3 texts of 8 tokens with a vocabulary of 5 take"),
        (lambda data: data[:20] + struct.pack("<i", 99) + data[24:], "has the token 99, and a"),
        (lambda data: data[:0], "is no base file of llama.cpp"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, damage, message):
    path = tmp_path / "a.kld"
    write_kld(path, *texts_and_logits(5, 8))
    path.write_bytes(damage(path.read_bytes()))

    with pytest.raises(MeasurementError) as error:
        read_kld(path)

    assert message in str(error.value)
    assert "llama-perplexity --kl-divergence-base FILE" in str(error.value)


def test_kernels_of_another_vocabulary_or_without_logits_are_refused(tmp_path):
    (engine, _), _, _ = tables(tmp_path)
    write_kld(tmp_path / "a.kld", *texts_and_logits(7, 8))

    with pytest.raises(MeasurementError, match="has a vocabulary of 7, and the kernel has 5"):
        compared_kld(read_kld(tmp_path / "a.kld"), engine, bos=None, batch_size=1)
    with pytest.raises(MeasurementError, match="the texts have 3 tokens, and a base file needs 8"):
        written_kld(tmp_path / "b.kld", engine, [[1, 2, 3]], width=8, bos=None, batch_size=1)


def test_a_file_that_cannot_be_written_is_refused_and_none_is_left(tmp_path):
    (engine, _), _, _ = tables(tmp_path)
    (tmp_path / "file").write_text("")
    texts, options = [[0, 1, 2, 3]], {"width": 4, "bos": None, "batch_size": 1}

    with pytest.raises(MeasurementError, match=r"cannot be written(.|\n)*or name another file"):
        written_kld(tmp_path / "file" / "a.kld", engine, texts, **options)

    def broken():
        yield texts_and_logits(5, 8)[1][0]
        raise MeasurementError("the engine ended")

    with pytest.raises(MeasurementError, match="the engine ended"):
        write_kld(tmp_path / "b.kld", texts_and_logits(5, 8)[0], broken())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "p.json", "q.json"]


def test_the_command_writes_and_compares(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tables(tmp_path)
    rows = [{"prompt": "a b c d a b a a"}] * 4
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    writing = ("--texts", "texts.jsonl", "--save-base", "p.kld", "--context", "8")

    written = servanda("tools", "kld", "table:p.json", *writing, "--quiet")
    same = servanda("tools", "kld", "table:p.json", "--base", "p.kld", "--quiet")
    other = servanda(
        "tools", "kld", "table:q.json", "--base", "p.kld", "--quiet", "--format", "json"
    )

    assert written.exit_code == same.exit_code == other.exit_code == 0, written.output
    assert written.stdout == "p.kld: 4 texts of 8 tokens, 0.0 MiB\n"
    assert "p.kld: 4 texts, 12 positions\n" in same.stdout
    assert "same top token     100 %" in same.stdout
    assert json.loads(other.stdout)["kld_nats"] > 0.01


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--base", "p.kld", "--save-base", "q.kld"),
        ("--texts", "t.jsonl"),
        ("--save-base", "q.kld"),
    ],
)
def test_the_command_either_compares_or_writes(tmp_path, monkeypatch, options):
    monkeypatch.chdir(tmp_path)
    for name in ("p.kld", "t.jsonl"):
        (tmp_path / name).write_text("x")

    done = servanda("tools", "kld", "table:p.json", *options)

    assert done.exit_code == 2
    assert "give --base FILE to compare, or --texts FILE --save-base FILE to write" in done.stderr
