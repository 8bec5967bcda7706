# What of engine `vllm` needs no vLLM: how its answers are read, and what is refused before it
# is started.  The engine itself is tested in tests/real.

import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from servanda.contract.model import Kernel
from servanda.engines import vllm_launch
from servanda.engines.vllm_launch import KEY, Reported, Tap, TapProcessor, trace_of
from servanda.errors import MeasurementError
from servanda.theory.sampling import Sampling, seed_of
from servanda.traces.trace import Batch

PLAIN = Sampling()
MODEL = Path(__file__).parents[2] / "models" / "tiny-lm"


@dataclass
class Flat:
    """vLLM's FlatLogprobs of three positions; of the first nothing is said."""

    start_indices = (0, 0, 3)
    end_indices = (0, 3, 6)
    token_ids = (7, 2, 4, 2, 2, 4)  # the token itself, then the two likeliest
    logprobs = (-3.0, -0.5, -1.5, -0.25, -0.25, -2.0)


def test_the_token_itself_is_told_from_the_likeliest():
    columns = Reported.of(Flat()).columns(2)
    assert columns["logp"].tolist() == [-3.0, -0.25]
    assert columns["id.0"].tolist() == [2, 2]
    assert columns["id.1"].tolist() == [4, 4]
    assert columns["logp.0"].tolist() == [-0.5, -0.25]
    assert columns["logp.1"].tolist() == [-1.5, -2.0]
    np.testing.assert_allclose(columns["p_max"], np.exp([-0.5, -0.25]))


def test_a_token_that_was_not_reported_is_unknown_and_not_zero():
    row_TV = Reported.of(Flat()).last(1).rows(5 + 3)
    assert row_TV[0, [2, 4]].tolist() == [-0.25, -2.0]
    assert np.isnan(np.delete(row_TV[0], [2, 4])).all()


def test_the_best_of_a_row_are_its_largest_and_ties_go_by_id():
    rows_TV = np.log(np.float32([[0.1, 0.3, 0.3, 0.3], [0.7, 0.1, 0.1, 0.1]]))
    best = Reported.best(rows_TV, (0, 3), 2)
    assert best.ids_TK.tolist() == [[0, 1, 2], [3, 0, 1]]
    both = best.then(Reported.best(rows_TV[:0], (), 2))
    assert both.ids_TK.tolist() == best.ids_TK.tolist()


def test_a_tap_keeps_raw_logprobs_and_lets_a_free_request_be():
    logits_V = torch.tensor([1.0, 2.0, 3.0])
    tap = Tap()
    assert tap([], logits_V.clone()).tolist() == [1.0, 2.0, 3.0]
    np.testing.assert_array_equal(tap.rows(1)[0], logits_V.log_softmax(-1).numpy())


def test_a_tap_leaves_a_forced_request_no_choice_and_still_keeps_what_it_would_have_been():
    tap, logits_V = Tap(forced=(2, 0)), torch.tensor([1.0, 2.0, 3.0])
    for step, token in enumerate(tap.forced):
        masked_V = tap([5] * step, logits_V.clone())
        assert masked_V.argmax() == token
        assert masked_V.isneginf().sum() == 2
    assert np.exp(tap.rows(2)).sum(axis=1) == pytest.approx([1, 1])


def test_a_prompt_that_is_read_in_pieces_counts_once_with_its_last_piece():
    tap = Tap()
    tap([], torch.tensor([9.0, 1.0]))
    tap([], torch.tensor([1.0, 1.0]))
    assert tap.rows(1).tolist() == [[pytest.approx(np.log(0.5))] * 2]


def test_a_tap_is_found_by_the_request_that_names_it():
    tap = Tap()
    processor = type("Taps", (TapProcessor,), {"taps": {"3": tap}})()

    def params(extra_args):
        return type("Params", (), {"extra_args": extra_args})

    assert processor.new_req_logits_processor(params({KEY: "3"})) is tap
    assert processor.new_req_logits_processor(params({KEY: "4"})) is None
    assert processor.new_req_logits_processor(params(None)) is None
    assert not processor.is_argmax_invariant()


def test_a_request_that_was_given_up_is_lost():
    batch = Batch((4, 5), ((1,), (1, 2)), 8)
    trace = trace_of([None, ((6, 7), {"logp": np.array([-1.0, -2.0])})], batch, {})
    assert trace.lost_S.tolist() == [True, False]
    assert trace.length_S.tolist() == [0, 2]
    assert trace.columns["logp"].tolist() == [-1.0, -2.0]
    nothing = trace_of([None, None], batch, {})
    assert nothing.lost_S.all()
    assert nothing.columns["logp"].tolist() == []


def test_seeds_are_fresh_per_request_and_those_of_a_torch_generator():
    seeds = {seed_of(seed, "vllm", sequence) for seed in range(8) for sequence in range(64)}
    assert len(seeds) == 8 * 64
    assert all(0 <= seed < 2**63 for seed in seeds)
    torch.Generator().manual_seed(max(seeds))


@pytest.mark.parametrize(
    ("kernel", "found"),
    [
        ({"dtype": "float64"}, "engine 'vllm' has no float64"),
        ({"quantization": "int8_weight_only"}, "has no quantization 'int8_weight_only'"),
    ],
)
def test_an_option_that_vllm_cannot_honour_is_refused_by_name(kernel, found):
    with pytest.raises(MeasurementError, match=found):
        vllm_launch.refuse_options(Kernel(engine="vllm", model="m", **kernel))


def test_a_checkpoint_whose_shapes_are_not_those_of_its_config_is_refused():
    """vLLM would load as much of each tensor as fits."""
    config = transformers.AutoConfig.from_pretrained(MODEL)
    assert set(vllm_launch.digests(MODEL, config)) == set(load_file(MODEL / "model.safetensors"))
    config.intermediate_size = 500
    with pytest.raises(MeasurementError, match=r"another shape than config\.json for") as said:
        vllm_launch.digests(MODEL, config)
    assert "down_proj.weight' (12 such)" in said.value.problems[0].message


def test_what_vllm_says_at_the_start_is_repeated():
    def refuse(*_, **options):
        assert options["logprobs_mode"] == "processed_logprobs"
        raise ValueError("1 validation error for VllmConfig\n  torch.float32 is not supported")

    vllm, kernel = type("Vllm", (), {"LLM": staticmethod(refuse)}), Kernel(engine="vllm", model="m")
    with pytest.raises(MeasurementError, match=r"VllmConfig torch\.float32 is not supported"):
        vllm_launch.start(vllm, kernel, MODEL, 512, None)


def test_an_interpreter_without_vllm_says_where_to_name_another(monkeypatch):
    monkeypatch.setattr("os.environ", {})
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MeasurementError, match="engine 'vllm' cannot be imported") as said:
        vllm_launch.imported()
    assert "python: .venvs/vllm" in said.value.problems[0].hint


def test_a_package_that_breaks_the_import_is_told_with_the_fix(monkeypatch):
    class Broken(ModuleType):
        def __getattr__(self, name):
            raise RuntimeError("operator torchvision::nms does not exist\nTraceback: ...")

    monkeypatch.setattr("os.environ", {})
    monkeypatch.setitem(sys.modules, "vllm", Broken("vllm"))
    with pytest.raises(MeasurementError, match="operator torchvision::nms does not exist") as said:
        vllm_launch.imported()
    assert "pip uninstall torchvision torchaudio torchcodec" in said.value.problems[0].hint


def test_vllm_is_kept_to_this_process_and_a_users_own_memory_is_respected(monkeypatch):
    environment = {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    monkeypatch.setattr("os.environ", environment)
    found = ModuleType("vllm")
    found.LLM = found.SamplingParams = object
    monkeypatch.setitem(sys.modules, "vllm", found)
    assert vllm_launch.imported() is found
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "4"
    assert environment["HF_HUB_OFFLINE"] == "1"
