# A run whose weights cannot fit is refused before a kernel is loaded: on fabricated machines, with
# a model that its header alone makes huge.

import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from servanda.contract.kernel_string import parse_kernel
from servanda.engines import engine_names, open_engine
from servanda.engines.worker import Worker
from servanda.errors import MeasurementError
from servanda.runner import host_memory
from servanda.runner.compare.contract import Options, prepare
from servanda.runner.host_memory import available_bytes, refuse_oversize, weight_bytes
from servanda.runner.probe import Engines
from tests import kit
from tests.kit import servanda

TINY = Path(__file__).parents[2] / "models/tiny-lm"
GB = 2**30
HUGE = "transformers:huge"
needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")


def kernel(text):
    return parse_kernel(text, engines=engine_names(), name="A")


def kernels(**texts):
    return {side: kernel(text) for side, text in texts.items()}


def checkpoint(folder, tensors, **config):
    """A folder of zeros that are not on disk; tensors: name -> dtype, bytes of a number, shape."""
    header, end = {}, 0
    for name, (dtype, size, shape) in tensors.items():
        begin, end = end, end + size * shape[0] * shape[1]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(folder / "model.safetensors", 8 + len(text) + end)


@pytest.fixture
def huge(tmp_path, monkeypatch):
    """Folder `huge`: 6 * 2**30 numbers in bfloat16, and others that no kernel converts."""
    monkeypatch.chdir(tmp_path)
    tensors = {
        "model.embed_tokens.weight": ("BF16", 2, [2**20, 2**10]),
        "model.layers.0.weight": ("BF16", 2, [5 * 2**20, 2**10]),
        "lm_head.weight": ("BF16", 2, [2**20, 2**10]),  # tied: not loaded beside the embeddings
        "steps": ("I64", 8, [1, 1]),
    }
    checkpoint(tmp_path / "huge", tensors)


@pytest.fixture
def machine(monkeypatch):
    """Sets the available memory; no child process can be started."""

    def unstarted(*_, **__):
        raise AssertionError("a kernel was loaded")

    def of(available):
        monkeypatch.setattr(host_memory, "available_bytes", lambda: available)
        monkeypatch.setattr(Worker, "__init__", unstarted)

    return of


@pytest.mark.parametrize(
    ("text", "gigabytes"),
    [
        (f"{HUGE}@float32", 24),
        (f"{HUGE}@float64", 48),
        (f"{HUGE}@float16", 12),
        (f"{HUGE}@float32+int8_weight_only", 24),  # quantised once it is whole
        (f"{HUGE}@float32,option.ranks=2", 24),  # the ranks together
        (f"{HUGE}@bfloat16", 0),  # mapped
        (f"{HUGE}@float32,device=cpu", 24),
        (f"{HUGE}@float32,device=cuda:1", 0),
        (f"{HUGE}@float32,option.offload=layers", 0),
        ("transformers:nowhere@float32", 0),  # its engine says that it is not there
        ("onnxruntime:huge@float32", 0),
        ("http://127.0.0.1:1", 0),
    ],
)
def test_weights_count_where_they_are_allocated(huge, text, gigabytes):
    assert weight_bytes(kernel(text)) == gigabytes * GB


def test_a_head_that_is_not_tied_counts(huge):
    Path("huge/config.json").write_text('{"tie_word_embeddings": false}')
    assert weight_bytes(kernel(f"{HUGE}@float32")) == 28 * GB


@pytest.mark.parametrize("header", [b'{"a": 1}', b'{"a": {"dtype": "BF16"}}', b"[]", b"{"])
def test_a_file_that_cannot_be_read_is_left_to_its_engine(huge, header):
    Path("huge/model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert weight_bytes(kernel(f"{HUGE}@float32")) == 0


def test_all_kernels_together_have_to_fit(huge, machine):
    both = kernels(train=f"{HUGE}@float32", infer=f"{HUGE}@float16", stable="http://127.0.0.1:1")
    machine(36 * GB)
    refuse_oversize(both)
    machine(36 * GB - 1)
    with pytest.raises(MeasurementError) as caught:
        refuse_oversize(both)
    assert str(caught.value).startswith(
        "the weights alone need 36.00 GB of memory, train (transformers huge float32 eager) "
        "24.00 GB, infer (transformers huge float16 eager) 12.00 GB, and this machine has 36.00 GB "
        "available"
    )
    refuse_oversize(both | {"train": kernel("http://127.0.0.1:1")})
    machine(None)  # a system that does not say
    refuse_oversize(both)


def compared(a, b, *words):
    Path("prompts.jsonl").write_text('{"prompt": "a"}\n')
    return servanda("compare", a, b, "--prompts", "prompts.jsonl", "--run-dir", "run", *words)


LOADED = "AssertionError: a kernel was loaded"


@pytest.mark.parametrize("plan", [("--plan",), ()])
def test_compare_refuses_before_it_loads(huge, machine, plan):
    machine(36 * GB - 1)
    words = (f"{HUGE}@float16", f"{HUGE}@float32", "--preset", "nvfp4", *plan)
    done = compared(*words)
    assert done.exit_code == 4 and not Path("run").exists()
    assert "infer (transformers huge float32 eager) 24.00 GB" in done.stderr
    assert "train (transformers huge float16 eager) 12.00 GB" in done.stderr
    assert "hint: use a smaller dtype" in done.stderr and LOADED not in done.stderr
    machine(36 * GB)
    assert LOADED in compared(*words).stderr


def test_compare_counts_the_kernel_that_shows_the_cost_of_a_format(huge, machine):
    """Two kernels in the dtype of the files take nothing; beside them runs train in float32."""
    machine(24 * GB - 1)
    words = (f"{HUGE}@bfloat16", f"{HUGE}@bfloat16,attention=sdpa", "--preset", "new-gpu")
    done = compared(*words)
    assert done.exit_code == 4 and "format (train in float32) 24.00 GB" in done.stderr
    machine(24 * GB)
    assert LOADED in compared(*words).stderr


def test_check_refuses_before_it_loads(huge, machine):
    """A contract with a stable kernel, and with a clause that allows what a format costs."""
    path, _ = kit.write(
        Path(), more="  - {id: f, metric: tv, aggregate: mean, at_most: 0.1, times_format: 2}"
    )
    text = path.read_text()
    for name, dtype in (("p.json", "bfloat16"), ("q.json", "bfloat16")):
        text = text.replace(
            f"engine: table, model: {name}", f"engine: transformers, model: huge, dtype: {dtype}"
        )
    path.write_text(text)
    machine(24 * GB - 1)
    done = servanda("check", path, "--run-dir", "run")
    assert done.exit_code == 4 and "format (train in float32) 24.00 GB" in done.stderr
    assert not Path("run").exists()
    machine(24 * GB)
    assert LOADED in servanda("check", path, "--run-dir", "run").stderr


def test_kernels_that_run_elsewhere_take_nothing_here(huge, machine):
    machine(0)
    sides = Options(f"{HUGE}@float16", f"{HUGE}@float32", preset="nvfp4")

    def actor(kernel, side):
        raise LookupError(side)

    with Engines(actor) as engines, pytest.raises(LookupError):
        prepare(sides, engines)


@needs_torch
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_what_counts_is_what_an_engine_allocates(dtype):
    """Of a real model, the parameters that do not lie in a mapped file."""
    asked = kernel(f"transformers:{TINY}@{dtype}")
    engine = open_engine(asked)
    places = [
        line.split()[0]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if str(TINY) in line
    ]
    mapped = [[int(end, 16) for end in place.split("-")] for place in places]
    own = {p.data_ptr(): p.nbytes for p in engine.model.parameters()}
    inside = (n for at, n in own.items() if not any(a <= at < b for a, b in mapped))
    assert sum(inside) == weight_bytes(asked)
    assert (weight_bytes(asked) > 0) == (dtype != "bfloat16")


@needs_torch
@pytest.mark.slow
def test_a_real_run_that_just_fits_is_measured(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    a, b = f"transformers:{TINY}@bfloat16", f"transformers:{TINY}@float32"
    need = weight_bytes(kernel(b))
    for available, code in ((need - 1, 4), (need, 0)):
        monkeypatch.setattr(host_memory, "available_bytes", lambda available=available: available)
        assert compared(a, b, "--preset", "nvfp4", "--plan").exit_code == code


# what a machine says


def told(root, group, **files):
    """A fabricated machine: 8 GB available, 1 GB of swap, and files of control groups by folder."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal: 99 kB\nMemAvailable:  {8 * 2**20} kB\nSwapFree: {2**20} kB\nHugePages_Free: 0\n"
    )
    (root / "proc/self/cgroup").write_text(group)
    for folder, texts in files.items():
        place = root / "sys/fs/cgroup" / folder
        place.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (place / name).write_text(text)
    return available_bytes(root)


def two(limit, held):
    return {"memory.max": f"{limit}\n", "memory.stat": f"anon {held}\nfile {9 * GB}\n"}


def one(limit, held):
    stat = f"cache {9 * GB}\nrss 1\ntotal_rss {held}\n"
    return {"memory.limit_in_bytes": f"{limit}\n", "memory.stat": stat}


@pytest.mark.parametrize(
    ("group", "files", "gigabytes"),
    [
        ("", {}, 9),
        ("0::/\n", {}, 9),  # no limit is told
        ("0::/\n", {"": two(4 * GB, GB)}, 4),  # of a container
        ("0::/a/b\n", {"a/b": two("max", GB), "a": two(6 * GB, 2 * GB)}, 5),
        ("0::/a/b\n", {"a/b": two(3 * GB, GB), "a": two(6 * GB, 2 * GB)}, 3),
        ("0::/a\n", {"a": two(16 * GB, GB)}, 9),  # the machine has less
        ("0::/a\n", {"a": two(GB, 2 * GB)}, 1),  # beyond its limit: swap
        ("4:memory:/a\n1:cpu,cpuacct:/\n0::/\n", {"memory/a": one(4 * GB, GB)}, 4),
        ("4:cpu,memory:/gone\n", {"memory": one(4 * GB, GB)}, 4),
        ("4:memory:/\n", {"memory": one(2**63 - 4096, GB)}, 9),
        ("1:cpu:/a\n", {"a": two(4 * GB, GB), "memory/a": one(4 * GB, GB)}, 9),
    ],
)
def test_the_machine_and_its_control_groups_say_what_is_available(
    tmp_path, group, files, gigabytes
):
    assert told(tmp_path, group, **files) == gigabytes * GB


def test_a_system_that_does_not_say_refuses_nothing(tmp_path):
    assert available_bytes(tmp_path) is None
    told(tmp_path, "0::/\n")
    (tmp_path / "proc/meminfo").write_text("MemTotal: 99 kB\n")
    assert available_bytes(tmp_path) is None


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="not Linux")
def test_this_machine_says_it():
    assert available_bytes() > 0
