# Each fault in a real engine: it breaks what it says, and nothing else.

import json
import shutil
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from servanda.contract.identity import same_policy
from servanda.contract.model import Kernel
from servanda.engines import open_engine
from servanda.engines.faults import FAULTS
from servanda.errors import IdentityError
from servanda.theory.sampling import Sampling, processed_logprobs
from servanda.traces.trace import Batch

MODEL = Path(__file__).parents[3] / "models" / "tiny-lm"
WIDTH, PLAIN = 6, Sampling()
ROUNDING = 1e-4  # float32, nats
IDENTITY = {"permuted_ids", "stale_weights"}
SAMPLERS = (
    *("undisclosed_top_p", "undisclosed_min_p", "undisclosed_temperature"),
    "lost_top_token",
)
every = pytest.mark.parametrize("name", [*FAULTS])
both_attentions = pytest.mark.parametrize("attention", ["eager", "sdpa"])


@lru_cache
def opened(name=None, value=None, model=MODEL, **kernel):
    fault = {name: FAULTS[name].default if value is None else value} if name else None
    options = {"engine": "transformers", "model": str(model), "batch_size": 4} | kernel
    return open_engine(Kernel(fault=fault, **options))


@pytest.fixture(scope="module", autouse=True)
def forget():
    yield
    opened.cache_clear()


def batch(*lengths, given=True, seed=0):
    """Seeded prompts of these lengths, with seeded continuations if they are given."""
    rng = np.random.default_rng(seed)
    prompts = tuple(tuple(rng.integers(1, 1024, n).tolist()) for n in lengths)
    more = tuple(tuple(rng.integers(1, 1024, WIDTH).tolist()) for _ in lengths)
    return Batch(tuple(range(len(lengths))), prompts, WIDTH, more if given else ())


SHORT, MIXED = (9, 17, 30, 4), (7, 40, 21, 290)


def logits(engine, some, path="decode"):
    return np.concatenate(list(engine.logits(some, path)))


def follow(trace, some):
    """The drawn tokens, as given ones; a lost sequence has none."""
    return Batch(some.sequence_S, some.prompts, some.width, trace.continuations)


def copied(tmp_path, **config):
    """The model with another config.json."""
    folder = shutil.copytree(MODEL, tmp_path / "model")
    data = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(data | config))
    return folder


# every fault


@pytest.mark.slow
@every
def test_the_engine_says_of_itself_what_the_healthy_one_says(name):
    healthy, faulty = opened().describe(), opened(name).describe()

    if name not in IDENTITY:
        assert faulty == healthy
        return
    assert faulty.fingerprint == healthy.fingerprint
    with pytest.raises(IdentityError, match="differ"):
        same_policy(healthy, faulty)


@pytest.mark.slow
@every
def test_drawing_and_scoring_by_decode_agree_and_both_are_reproducible(name):
    engine, some = opened(name), batch(*SHORT, given=False)

    drawn, again = (engine.generate(some, PLAIN, 3) for _ in range(2))
    scored = engine.score(follow(drawn, some), PLAIN, "decode")

    assert drawn.continuations == again.continuations == scored.continuations
    for column in scored.columns:
        assert np.array_equal(drawn.columns[column], again.columns[column])
        assert np.array_equal(drawn.columns[column], scored.columns[column]), column


@pytest.mark.slow
@every
def test_the_fault_is_there_and_the_healthy_engine_is_without_it(name):
    """On long prompts in bfloat16, the kernel it is met in; each fault by what it changes."""
    kernel = {"dtype": "float32"} if name == "bf16_logits" else {"dtype": "bfloat16"}
    healthy, faulty = opened(**kernel), opened(name, **kernel)
    some = batch(*MIXED)

    if name in SAMPLERS:
        drew = [e.generate(batch(*MIXED, given=False), PLAIN, 5) for e in (healthy, faulty)]
        assert drew[0].continuations != drew[1].continuations or name == "lost_top_token"
        assert np.array_equal(logits(healthy, some), logits(faulty, some))
    elif name == "lost_sequences":
        drew = [e.generate(batch(*[3] * 60, given=False), PLAIN, 5) for e in (healthy, faulty)]
        assert not drew[0].lost_S.any() and drew[1].lost_S.any()
    elif name == "permuted_ids":
        assert healthy.encode(["a b"]) != faulty.encode(["a b"])
    elif name == "off_by_one_shift":
        assert np.array_equal(logits(healthy, some), logits(faulty, some))
    else:
        assert not np.array_equal(logits(healthy, some), logits(faulty, some))


# samplers and delivery


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("path", ["prefill", "decode"])
def test_a_sampler_fault_leaves_the_logprobs_of_given_tokens(name, path):
    healthy, faulty = (e.score(batch(*SHORT), PLAIN, path) for e in (opened(), opened(name)))
    for column in healthy.columns:
        assert np.array_equal(healthy.columns[column], faulty.columns[column])


@pytest.mark.parametrize(
    ("name", "value", "hidden"),
    [
        ("undisclosed_top_p", 0.5, Sampling(top_p=0.5)),
        ("undisclosed_min_p", 0.3, Sampling(min_p=0.3)),
        ("undisclosed_temperature", 0.5, Sampling(temperature=0.5)),
    ],
)
def test_what_is_drawn_is_what_the_hidden_transform_draws(name, value, hidden):
    some = batch(*SHORT, given=False)

    drawn = opened(name, value).generate(some, PLAIN, 3)

    assert drawn.continuations == opened().generate(some, hidden, 3).continuations
    assert drawn.about == opened().generate(some, PLAIN, 3).about


def test_the_best_token_is_never_drawn_where_it_is_always_lost():
    some = batch(*SHORT, given=False)

    drawn = opened("lost_top_token", 1.0).generate(some, PLAIN, 3)

    assert (drawn.token_N != drawn.columns["top1"]).all()
    assert (drawn.columns["mass_before"] > 0).all()  # the record knows of a likelier one


def test_a_sequence_that_is_not_lost_is_whole():
    some = batch(*[5] * 30, given=False)

    whole = opened().generate(some, PLAIN, 3)
    lossy = opened("lost_sequences", 0.7).generate(some, PLAIN, 3)

    for lost, kept, all_of_it in zip(
        lossy.lost_S, lossy.continuations, whole.continuations, strict=True
    ):
        assert kept == (() if lost else all_of_it)
    assert 0 < lossy.lost_S.sum() < 30


# identity


def test_permuted_ids_are_another_vocabulary_for_the_same_texts():
    healthy, faulty = opened(), opened("permuted_ids", 5)
    ids = healthy.encode(["def f(x):"])[0]

    assert faulty.encode(["def f(x):"])[0] == [(i + 5) % 1024 for i in ids]
    assert [faulty.vocabulary()[(i + 5) % 1024] for i in ids] == [
        healthy.vocabulary()[i] for i in ids
    ]
    assert np.array_equal(logits(healthy, batch(*SHORT)), logits(faulty, batch(*SHORT)))


def test_the_stale_head_is_no_longer_the_embedding_which_is_fresh():
    healthy, faulty = opened().model, opened("stale_tied_head").model
    embedding = faulty.get_input_embeddings().weight

    assert healthy.get_output_embeddings().weight is healthy.get_input_embeddings().weight
    assert torch.equal(embedding, healthy.get_input_embeddings().weight)
    gap = (faulty.get_output_embeddings().weight - embedding).detach().std()
    assert float(gap) == pytest.approx(2e-3, rel=0.02)


# positions


@pytest.mark.parametrize("path", ["prefill", "decode"])
def test_bfloat16_holds_positions_up_to_256_and_no_further(path):
    healthy, faulty = opened(), opened("bf16_positions")
    # the last token is never fed: the last position is 251 + 6 - 2 = 255, and then 257
    short, long = batch(3, 251), batch(3, 253)

    assert np.array_equal(logits(healthy, short, path), logits(faulty, short, path))
    one, other = logits(healthy, long, path), logits(faulty, long, path)
    assert np.array_equal(one[:-1], other[:-1])
    assert np.abs(one[-1] - other[-1]).max() > 1e-3


@pytest.mark.parametrize("path", ["prefill", "decode"])
def test_another_rope_base_is_that_of_another_config(tmp_path, path):
    faulty = opened("wrong_rope_base", 3.0)
    said = {"rope_theta": 30000.0, "rope_type": "default"}
    oracle = opened(model=copied(tmp_path, rope_parameters=said))

    expected = logits(oracle, batch(*MIXED), path)
    assert logits(faulty, batch(*MIXED), path) == pytest.approx(expected, abs=ROUNDING)


# attention


@pytest.mark.slow
@both_attentions
@pytest.mark.parametrize("path", ["prefill", "decode"])
def test_a_window_is_that_of_a_model_with_sliding_attention(attention, path):
    """Mistral is Llama with a window: same tensors, same names."""
    engine, some = opened("attention_window", 16, attention=attention), batch(*MIXED)
    config = transformers.MistralConfig(
        **json.loads((MODEL / "config.json").read_text()) | {"sliding_window": 16}
    )
    model = transformers.MistralForCausalLM(config).eval()
    missing, _ = model.load_state_dict(load_file(MODEL / "model.safetensors"), strict=False)
    assert set(missing) <= {"lm_head.weight"}
    model.set_attn_implementation("eager")
    rows = []
    with torch.no_grad():
        for prompt, tokens in zip(some.prompts, some.continuations, strict=True):
            whole = model(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0]
            rows.append(whole[len(prompt) - 1 : -1].numpy())

    assert logits(engine, some, path) == pytest.approx(np.concatenate(rows), abs=ROUNDING)


@both_attentions
@pytest.mark.parametrize("path", ["prefill", "decode"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_window_leaves_prompts_that_fit_into_it(attention, path, dtype):
    kernel = {"attention": attention, "dtype": dtype}
    healthy, faulty = opened(**kernel), opened("attention_window", 36, **kernel)

    one, other = logits(healthy, batch(*SHORT), path), logits(faulty, batch(*SHORT), path)

    assert np.array_equal(one, other)


@both_attentions
def test_padding_that_is_seen_changes_the_shorter_rows_and_no_longest_one(attention):
    healthy, faulty = (opened(n, attention=attention) for n in (None, "mask_contamination"))

    gap_N = np.abs(logits(healthy, batch(*SHORT)) - logits(faulty, batch(*SHORT))).max(axis=-1)

    longest_N = np.repeat(np.array(SHORT) == max(SHORT), WIDTH)
    assert (gap_N[~longest_N] > 1e-2).all()
    assert (gap_N[longest_N] < ROUNDING).all()
    alone = batch(12)
    assert np.array_equal(logits(healthy, alone), logits(faulty, alone))
    prefill = (logits(e, batch(*SHORT), "prefill") for e in (healthy, faulty))
    assert np.array_equal(*prefill)  # padded on the right, behind every query


@pytest.mark.parametrize("value", ["token", "head"])
def test_the_cache_holds_integers_of_eight_bits(value):
    """What comes back is k / 127 of the scale's maximum, for whole k."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(2, 2, 5, 8, generator=generator)
    then = 3 * torch.randn(2, 2, 1, 8, generator=generator)
    cache = opened("kv_cache_int8", value)._cache()

    held, _ = cache.update(first, first, 0)
    held, values = cache.update(then, then, 0)

    assert torch.equal(held, values)
    whole = torch.cat([first, then], dim=2)
    over = -1 if value == "token" else (2, 3)
    of = whole if value == "token" else first
    step = of.abs().amax(dim=over, keepdim=True) / 127
    integers = held / step
    assert torch.allclose(integers, integers.round(), atol=1e-3)
    assert integers.abs().max() <= 127 + 1e-3
    inside = whole.abs() <= step * 127 * (1 + 1e-6)
    assert ((held - whole).abs() <= step / 2 + 1e-6)[inside].all()
    assert inside.all() == (value == "token")  # one scale a head clips what came later


def test_a_cache_in_eight_bits_leaves_prefill():
    prefill = (logits(opened(n), batch(*SHORT), "prefill") for n in (None, "kv_cache_int8"))
    assert np.array_equal(*prefill)


# numerics


def test_undeclared_four_bits_are_the_four_bits_that_a_kernel_can_declare():
    declared = opened(quantization="int4_g32")
    assert np.array_equal(logits(opened("int4"), batch(*SHORT)), logits(declared, batch(*SHORT)))
    assert opened("int4").describe().fingerprint["quantization"] == "none"


def test_another_epsilon_is_that_of_another_config(tmp_path):
    oracle = opened(model=copied(tmp_path, rms_norm_eps=1e-3))
    faulty = opened("norm_epsilon", 1000)
    expected = logits(oracle, batch(*SHORT))
    assert logits(faulty, batch(*SHORT)) == pytest.approx(expected, abs=ROUNDING)


def test_one_slice_of_the_vocabulary_is_damaged_and_the_rest_is_not():
    healthy, faulty = (
        logits(e, batch(*SHORT)) for e in (opened(), opened("corrupted_vocabulary", 0.25))
    )
    # a head of its own lies elsewhere in memory, and so its product may round otherwise
    assert faulty[:, :768] == pytest.approx(healthy[:, :768], abs=1e-5)
    assert (np.abs(healthy[:, 768:] - faulty[:, 768:]).max(axis=0) > 1e-3).all()


def test_logits_in_bfloat16_are_the_same_logits_rounded():
    healthy, faulty = (logits(opened(n), batch(*SHORT), "prefill") for n in (None, "bf16_logits"))
    rounded = torch.from_numpy(healthy).bfloat16().float().numpy()
    assert np.array_equal(faulty, rounded)


# the record, the batch, the trainer


@pytest.mark.parametrize("value", [1, 2])
def test_a_shift_moves_the_record_and_leaves_the_tokens(value):
    some = batch(*SHORT, given=False)
    whole, shifted = (
        e.generate(some, PLAIN, 3) for e in (opened(), opened("off_by_one_shift", value))
    )

    assert shifted.continuations == whole.continuations
    for name, column in whole.columns.items():
        ends = np.cumsum(whole.length_S)[:-1]
        for one, other in zip(
            np.split(column, ends), np.split(shifted.columns[name], ends), strict=True
        ):
            expected = [one[min(t + value, len(one) - 1)] for t in range(len(one))]
            assert other.tolist() == expected


def test_a_row_leaks_into_the_next_and_a_row_alone_does_not():
    healthy, faulty = opened(), opened("batch_dependent", 0.25)
    some = batch(8, 8, 8)

    one, other = (logits(e, some).reshape(3, WIDTH, -1) for e in (healthy, faulty))

    assert other == pytest.approx(0.75 * one + 0.25 * np.roll(one, 1, axis=0), abs=ROUNDING)
    alone = batch(8)
    assert np.array_equal(logits(healthy, alone), logits(faulty, alone))


def test_dropout_masks_are_fresh_for_every_forward_and_the_run_is_repeatable():
    """So the side differs from itself in another batch: the floor of its noise floor shows it."""
    engine, some = opened("dropout_in_train"), batch(*SHORT)
    state = torch.random.get_rng_state()

    first, again = (logits(engine, some, "prefill") for _ in range(2))
    fewer = logits(engine, some.take(range(2)), "prefill")
    healthy = logits(opened(), some, "prefill")

    assert np.array_equal(first, again)
    assert torch.equal(torch.random.get_rng_state(), state)
    gap = {"healthy": first - healthy, "itself": first[: 2 * WIDTH] - fewer}
    assert all(np.abs(g).max() > 0.05 for g in gap.values())
    assert processed_logprobs(first, PLAIN).mean() == pytest.approx(
        processed_logprobs(healthy, PLAIN).mean(), abs=0.5
    )


@pytest.mark.slow
def test_an_injected_fault_stays_in_its_own_engine():
    """Engines of one process share no module that a fault could have changed for all."""
    before = logits(opened(), batch(*SHORT))
    for name in FAULTS:
        logits(opened(name), batch(*SHORT))
    opened.cache_clear()
    assert np.array_equal(before, logits(opened(), batch(*SHORT)))
