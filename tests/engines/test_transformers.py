# Engine `transformers` on throw-away models, against the plain forward of one sequence.

from __future__ import annotations

import hashlib
import json
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from servanda import engines
from servanda.contract.model import Kernel
from servanda.engines import local_engine
from servanda.engines.base import ENGINES
from servanda.engines.checkpoint import read_weights, tensor_digest
from servanda.engines.conformance import check_engine
from servanda.engines.folder import end_tokens, token_digest
from servanda.engines.safetensors import read_stored
from servanda.engines.transformers import TransformersEngine
from servanda.engines.worker import spawn
from servanda.errors import MeasurementError
from servanda.theory.sampling import Sampling
from servanda.traces.trace import Batch

VOCAB, CONTEXT, WIDTH = 64, 48, 12
EOS = (1, 2, 3)
PLAIN = Sampling()
FILTERED = Sampling(temperature=0.8, top_k=40, top_p=0.9, min_p=0.01)
ROUNDING = 1e-5  # float32, nats, on logits of this size
PATHS = pytest.mark.parametrize("path", ["prefill", "decode"])


def save_model(folder, **config):
    """A random Llama whose logits differ by several nats, and words t0 .. t63."""
    config = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2} | config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=VOCAB,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=CONTEXT,
                tie_word_embeddings=True,
                initializer_range=0.25,
                bos_token_id=0,
                eos_token_id=EOS[0],
                **config,
            )
        )
    model.generation_config = transformers.GenerationConfig(eos_token_id=list(EOS))
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB - 1)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing("t0 $A", special_tokens=[("t0", 0)])
    transformers.utils.logging.disable_progress_bar()  # the reports of pytest are kept clean
    model.save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def copy(folder, tmp_path):
    """A folder of one's own to spoil."""
    return shutil.copytree(folder, tmp_path / "model")


def open_engine(folder, **kernel):
    return TransformersEngine(
        Kernel(**{"engine": "transformers", "model": str(folder), "batch_size": 4} | kernel)
    )


@pytest.fixture(scope="session")
def engine(folder):
    return open_engine(folder)


def prompts(n=6, seed=0):
    rng = np.random.default_rng(seed)
    return tuple(tuple(rng.integers(4, VOCAB, 1 + 3 * i % 11).tolist()) for i in range(n))


def launched(n=6, width=WIDTH):
    return Batch(tuple(range(10, 10 + n)), prompts(n), width)


def given(trace, batch):
    return Batch(batch.sequence_S, batch.prompts, batch.width, trace.continuations)


@pytest.fixture(scope="session")
def drawn(engine):
    """A batch with the continuations that float32 drew: short ones and long ones."""
    return given(engine.generate(launched(), PLAIN, 3), launched())


def oracle_logits(folder, batch):
    """[N, V] float64: one sequence at a time, no padding, no cache, eager attention."""
    model = transformers.LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager")
    rows = []
    with torch.no_grad():
        for prompt, tokens in zip(batch.prompts, batch.continuations, strict=True):
            logits = model(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0]
            rows.append(logits[len(prompt) - 1 : -1].double().numpy())
    return np.concatenate(rows)


def columns_equal(one, other):
    return all(np.array_equal(one.columns[c], other.columns[c]) for c in one.columns)


# what the numbers are


@pytest.mark.parametrize("attention", ["eager", "sdpa", "sdpa_math", "sdpa_flash"])
@PATHS
def test_scores_are_those_of_the_plain_forward_of_one_sequence(folder, drawn, path, attention):
    trace = open_engine(folder, attention=attention).score(drawn, PLAIN, path)

    logits_NV = torch.tensor(oracle_logits(folder, drawn))
    logp_NV = torch.log_softmax(logits_NV, dim=-1)
    logp_N = logp_NV[torch.arange(len(logp_NV)), torch.tensor(trace.token_N)]
    entropy_N = torch.distributions.Categorical(logits=logits_NV).entropy()
    assert trace.columns["logp"] == pytest.approx(logp_N.numpy(), abs=ROUNDING)
    assert trace.columns["entropy_nats"] == pytest.approx(entropy_N.numpy(), abs=ROUNDING)
    assert trace.columns["p_max"] == pytest.approx(logp_NV.exp().amax(dim=-1).numpy(), abs=1e-5)
    assert np.array_equal(trace.columns["top1"], logp_NV.argmax(dim=-1).numpy())
    assert np.ptp(logp_N.numpy()) > 3  # the model has opinions


@pytest.mark.parametrize("sampling", [PLAIN, FILTERED], ids=["plain", "filtered"])
@pytest.mark.parametrize(
    "kernel",
    [
        {"dtype": "float64"},
        {"dtype": "float32"},
        {"dtype": "float32", "attention": "sdpa"},
        {"dtype": "bfloat16", "attention": "sdpa"},
        {"dtype": "float16"},
        {"dtype": "bfloat16", "quantization": "int8_weight_only"},
        {"dtype": "float32", "quantization": "int4_g32"},
    ],
    ids=lambda kernel: " ".join(kernel.values()),
)
def test_scoring_by_decode_repeats_generation_bit_for_bit(folder, kernel, sampling):
    engine, batch = open_engine(folder, **kernel), launched()

    drew = engine.generate(batch, sampling, seed=3)
    scored = engine.score(given(drew, batch), sampling, "decode")

    assert np.isfinite(drew.columns["logp"]).all()
    assert columns_equal(drew, scored)
    assert drew.continuations == scored.continuations
    assert drew.about == scored.about


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_decode_and_prefill_agree_up_to_rounding(folder, drawn, attention):
    engine = open_engine(folder, attention=attention)

    decode, prefill = (engine.score(drawn, PLAIN, path) for path in ("decode", "prefill"))

    gap = np.abs(decode.columns["logp"] - prefill.columns["logp"])
    assert 0 < gap.max() < ROUNDING  # not the same program, and the same function


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@PATHS
def test_padding_and_company_move_a_logprob_by_rounding_only(folder, drawn, path, attention):
    together = open_engine(folder, attention=attention, batch_size=6).score(drawn, PLAIN, path)
    alone = open_engine(folder, attention=attention, batch_size=1).score(drawn, PLAIN, path)
    backwards = drawn.take(range(len(drawn))[::-1])
    turned = open_engine(folder, attention=attention).score(backwards, PLAIN, path)

    ends = np.cumsum(turned.length_S)[:-1]
    turned_N = np.concatenate(np.split(turned.columns["logp"], ends)[::-1])
    assert together.columns["logp"] == pytest.approx(alone.columns["logp"], abs=ROUNDING)
    assert together.columns["logp"] == pytest.approx(turned_N, abs=ROUNDING)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
@PATHS
def test_eager_attention_survives_padding_in_every_precision(folder, drawn, path, dtype):
    """In float64 the mask of a column of padding does not fit the float32 of the softmax."""
    trace = open_engine(folder, dtype=dtype).score(drawn, PLAIN, path)

    reference = open_engine(folder).score(drawn, PLAIN, path)
    close = {"float16": 0.1, "float64": ROUNDING}[dtype]
    assert trace.columns["logp"] == pytest.approx(reference.columns["logp"], abs=close)


@PATHS
@pytest.mark.parametrize("chunk_elements", [1, 5 * VOCAB, 1 << 22])
def test_logits_are_those_behind_the_scores_row_by_row(
    engine, drawn, path, chunk_elements, monkeypatch
):
    monkeypatch.setattr(local_engine, "CHUNK_ELEMENTS", chunk_elements)
    trace = engine.score(drawn, PLAIN, path)

    pieces = list(engine.logits(drawn, path))

    logits_NV = np.concatenate(pieces)
    logp_NV = torch.log_softmax(torch.tensor(logits_NV, dtype=torch.float64), dim=-1).numpy()
    assert logits_NV.dtype == np.float32
    assert logits_NV.shape == (len(trace.token_N), VOCAB)
    assert max(map(len, pieces)) <= max(1, chunk_elements // VOCAB)
    assert trace.columns["logp"] == pytest.approx(
        logp_NV[np.arange(len(logp_NV)), trace.token_N], abs=1e-12
    )


# what is drawn


def test_the_tokens_drawn_do_not_depend_on_how_the_batch_is_cut(folder):
    batch = launched()

    drew = [open_engine(folder, batch_size=n).generate(batch, PLAIN, 3) for n in (1, 4, 6)]

    for one, other in pairwise(drew):
        assert one.continuations == other.continuations
        assert one.columns["logp"] == pytest.approx(other.columns["logp"], abs=ROUNDING)


def test_a_seed_draws_the_same_tokens_again_and_another_seed_others(engine):
    first, again, other = (engine.generate(launched(), PLAIN, seed) for seed in (3, 3, 4))

    assert columns_equal(first, again)
    assert first.continuations == again.continuations != other.continuations


def test_a_sequence_ends_with_its_first_end_token_which_is_scored(engine):
    trace = engine.generate(launched(), PLAIN, 3)

    ended = [tokens for tokens in trace.continuations if tokens[-1] in EOS]
    whole = [tokens for tokens in trace.continuations if tokens[-1] not in EOS]
    assert ended
    assert whole  # both kinds were met
    assert all(set(tokens[:-1]).isdisjoint(EOS) for tokens in trace.continuations)
    assert all(len(tokens) == WIDTH for tokens in whole)
    assert len(trace.columns["logp"]) == sum(map(len, trace.continuations))


@pytest.mark.parametrize("sampling", [PLAIN, FILTERED], ids=["plain", "filtered"])
def test_a_drawn_token_has_mass_and_the_trace_says_how_it_was_drawn(engine, sampling):
    trace = engine.generate(launched(), sampling, 3)

    assert np.isfinite(trace.columns["logp"]).all()
    assert (trace.columns["mass_before"] + np.exp(trace.columns["logp"]) <= 1 + 1e-12).all()
    assert dict(trace.about) == {
        "path": "decode",
        "batch_size": "4",
        "sampling": sampling.model_dump_json(),
    }
    assert trace.sequence_S.tolist() == [10, 11, 12, 13, 14, 15]
    assert trace.prompt_tokens_S.tolist() == [len(p) for p in launched().prompts]
    assert not trace.lost_S.any()


def test_the_shape_that_runs_is_fixed_by_the_launch(engine, drawn, monkeypatch):
    """Prefill: one shape, and never a full mask. Decode: ended rows are stepped on."""
    seen = []

    def listen(model, args, kwargs):
        seen.append((tuple(kwargs["input_ids"].shape), bool(kwargs["attention_mask"].all())))

    handle = engine.model.register_forward_pre_hook(listen, with_kwargs=True)
    longest = max(len(p) for p in drawn.prompts[:4])
    full = Batch(drawn.sequence_S, drawn.prompts, WIDTH, ((7,) * WIDTH,) * 6)
    for batch in (drawn, full):
        seen.clear()
        engine.score(batch.take(range(4)), PLAIN, "prefill")
        assert seen == [((4, longest + WIDTH), False)]

    seen.clear()
    drew = engine.generate(drawn.take(range(4)), PLAIN, 3)
    handle.remove()
    assert [shape for shape, _ in seen] == [(4, longest), *[(4, 1)] * (drew.length_S.max() - 1)]
    assert len(set(drew.length_S)) > 1


@PATHS
def test_a_sequence_without_tokens_leaves_its_neighbours_alone(engine, drawn, path):
    some = Batch(drawn.sequence_S, drawn.prompts, WIDTH, ((), *drawn.continuations[1:]))
    none = Batch(drawn.sequence_S, drawn.prompts, WIDTH, ((),) * 6)

    trace, whole = engine.score(some, PLAIN, path), engine.score(drawn, PLAIN, path)

    assert trace.length_S[0] == 0
    assert np.array_equal(trace.columns["logp"], whole.columns["logp"][whole.length_S[0] :])
    assert len(engine.score(none, PLAIN, path).columns["logp"]) == 0
    assert list(engine.logits(none, path)) == []


# who it is


def test_the_digests_are_of_the_checkpoint_and_not_of_what_the_kernel_makes_of_it(folder):
    kernels = [
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"dtype": "float16", "quantization": "int4_g32"},
    ]

    said = [open_engine(folder, **kernel).describe() for kernel in kernels]

    assert len({d.weights for d in said}) == 1
    assert len({d.tokens for d in said}) == 1
    assert len({d.digest for d in said}) == 3


def test_a_digest_is_of_the_shape_and_of_float32_bytes(folder, engine):
    state = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    data = b"[96, 64]" + state[name].numpy().astype("<f4").tobytes()

    assert engine.describe().tensors[name] == hashlib.blake2b(data, digest_size=16).hexdigest()
    assert engine.describe().tensors.keys() == state.keys()
    assert tensor_digest(torch.zeros(2, 3)) != tensor_digest(torch.zeros(3, 2))
    assert tensor_digest(torch.tensor(1.5)) == tensor_digest(torch.tensor(1.5).bfloat16())


def test_a_tied_head_counts_once_and_one_other_weight_is_another_digest_of_one_tensor(copy, engine):
    state = load_file(copy / "model.safetensors")
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, copy / "model.safetensors", metadata={"format": "pt"})

    assert open_engine(copy).describe().tensors == engine.describe().tensors
    state["model.norm.weight"][7] += 1e-6
    save_file(state, copy / "model.safetensors", metadata={"format": "pt"})

    ours, theirs = engine.describe().tensors, open_engine(copy).describe().tensors

    assert [name for name in ours if ours[name] != theirs[name]] == ["model.norm.weight"]


def test_a_checkpoint_in_shards_is_the_same_checkpoint(copy, engine):
    file = copy / "model.safetensors"
    transformers.LlamaForCausalLM.from_pretrained(copy).save_pretrained(copy, max_shard_size="40KB")
    file.unlink(missing_ok=True)

    sharded = open_engine(copy).describe()

    assert len(list(copy.glob("model-*.safetensors"))) > 1
    assert sharded.tensors == engine.describe().tensors


def test_the_description_says_everything_that_may_change_a_number(folder):
    kernel = {"dtype": "bfloat16", "attention": "sdpa", "quantization": "int8_weight_only"}

    said = open_engine(folder, **kernel).describe()

    assert said.fingerprint.items() >= kernel.items()
    assert said.fingerprint["torch"] == torch.__version__
    assert said.fingerprint["transformers"] == transformers.__version__
    assert said.fingerprint["threads"] == "1"
    assert said.fingerprint["architecture"] == "llama"
    assert said.fingerprint.keys() >= {"python", "device", "cpu", "config", "engine"}
    assert (said.vocab_size, said.context, said.eos) == (VOCAB, CONTEXT, EOS)
    assert said.full_logits


@pytest.mark.parametrize(
    ("generation", "config", "ids"),
    [
        ({"eos_token_id": [5, 6]}, {"eos_token_id": 1}, (5, 6)),
        ({"eos_token_id": 0}, {}, (0,)),
        ({}, {"eos_token_id": 1}, (1,)),
        (None, {"eos_token_id": [1, 2]}, (1, 2)),
        (None, {"eos_token_id": None}, ()),
    ],
)
def test_end_tokens_come_from_the_generation_config_first(tmp_path, generation, config, ids):
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))

    assert end_tokens(tmp_path, config) == ids


def test_the_token_digest_sees_ids_and_rules_and_not_the_order_of_keys():
    def digest(ids, rules):
        return token_digest(ids, {"model": {"vocab": ids}} | rules)

    same = digest({"a": 0, "b": 1}, {"normalizer": None})
    assert same == digest({"b": 1, "a": 0}, {"normalizer": None})
    assert same != digest({"a": 1, "b": 0}, {"normalizer": None})
    assert same != digest({"a": 0, "b": 1}, {"normalizer": {"type": "NFC"}})


def test_texts_are_encoded_without_special_tokens_and_decoded_and_every_id_has_a_name(engine):
    assert engine.encode(["t5 t6", "", "t7 what"]) == [[5, 6], [], [7, 0]]
    assert engine.encode([]) == []
    texts = ["t3 t17 t5", "t9"]
    assert engine.decode(engine.encode(texts)) == texts
    assert engine.decode([[], [VOCAB - 1]])[0] == ""  # an id without a name is no error
    assert engine.vocabulary() == [f"t{i}" for i in range(VOCAB - 1)] + [f"<{VOCAB - 1}>"]


def test_the_engine_is_registered_and_can_be_closed(folder):
    engine = ENGINES["transformers"](Kernel(engine="transformers", model=str(folder)))

    assert isinstance(engine, TransformersEngine)
    engine.close()
    engine.close()


# the seams


@PATHS
def test_positions_can_be_overridden(engine, drawn, path):
    """A shift of all positions would not do: to rotary embeddings it is no difference."""

    class StandsStill(TransformersEngine):
        def _positions(self, mask):
            return torch.zeros_like(mask)

    still = StandsStill(engine.kernel).score(drawn, PLAIN, path)

    gap_N = still.columns["logp"] - engine.score(drawn, PLAIN, path).columns["logp"]
    assert np.abs(gap_N).max() > 100 * ROUNDING


def test_the_state_can_be_overridden_and_is_what_the_digests_are_of(engine, drawn):
    class Nudged(TransformersEngine):
        def _load_state(self):
            state = super()._load_state()
            state["model.layers.0.mlp.up_proj.weight"].mul_(1.01)
            return state

    nudged = Nudged(engine.kernel)

    ours, theirs = engine.describe().tensors, nudged.describe().tensors
    assert sum(ours[name] != theirs[name] for name in ours) == 1
    gap_N = (
        nudged.score(drawn, PLAIN, "prefill").columns["logp"]
        - engine.score(drawn, PLAIN, "prefill").columns["logp"]
    )
    assert np.abs(gap_N).max() > 100 * ROUNDING


# what is wrong, and what to do


@PATHS
@pytest.mark.parametrize("sampling", [PLAIN, FILTERED], ids=["plain", "filtered"])
def test_weights_that_are_no_numbers_load_and_show_as_nan(copy, drawn, path, sampling):
    state = load_file(copy / "model.safetensors")
    state["model.norm.weight"][3] = float("nan")
    save_file(state, copy / "model.safetensors", metadata={"format": "pt"})
    engine = open_engine(copy)

    assert np.isnan(engine.score(drawn, sampling, path).columns["logp"]).all()
    assert np.isnan(engine.generate(launched(), sampling, 3).columns["logp"]).all()


def refusal(act):
    with pytest.raises(MeasurementError) as error:
        act()
    return str(error.value)


def test_a_missing_folder_is_answered_with_the_nearest(copy):
    wrong = copy.parent / "modle"

    assert refusal(lambda: open_engine(wrong)) == (
        f"the model folder '{wrong}' does not exist\n  hint: did you mean '{copy}'?"
    )
    assert refusal(lambda: open_engine(copy.parent / "none" / "here")).endswith(
        "hint: name a folder, or a model of the Hub as hf://ORGANISATION/NAME"
    )
    assert refusal(lambda: open_engine(copy / "config.json")).startswith(
        f"the model folder '{copy / 'config.json'}' is a file"
    )


def test_a_kernel_without_a_model_is_told_what_to_add(folder):
    assert refusal(lambda: TransformersEngine(Kernel(engine="transformers"))) == (
        "the kernel names no model\n"
        "  hint: add model: path/to/folder, a folder with config.json and model.safetensors"
    )


WEIGHTS, AGAIN = "model.safetensors", "copy the folder again, or write it anew with save_pretrained"
SAVE = "save model and tokenizer into this folder with save_pretrained"
PICKLE = "pytorch_model.bin is a pickle and is not read: save it as safetensors"
INDEX = json.dumps({"weight_map": {"a": "model-1.safetensors"}})


@pytest.mark.parametrize(
    ("spoil", "name", "hint"),
    [
        (lambda copy: (copy / "config.json").unlink(), "config.json", SAVE),
        (lambda copy: (copy / "tokenizer.json").unlink(), "tokenizer.json", SAVE),
        (lambda copy: (copy / WEIGHTS).rename(copy / "pytorch_model.bin"), WEIGHTS, PICKLE),
        (
            lambda copy: (copy / f"{WEIGHTS}.index.json").write_text(INDEX),
            "model-1.safetensors",
            AGAIN,
        ),
    ],
    ids=["config", "tokenizer", "pickle", "shard"],
)
def test_a_folder_without_a_file_is_told_which_and_what_to_do(copy, spoil, name, hint):
    spoil(copy)

    assert refusal(lambda: open_engine(copy)) == (
        f"the model folder '{copy}' has no {name}\n  hint: {hint}"
    )


EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def shards(copy):
    """The tensors of a checkpoint in two files, and the file of each by its index."""
    state = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    places = {n: "a.safetensors" if "embed" in n else "b.safetensors" for n in state}
    for file in set(places.values()):
        write_tensors(copy / file, {n: state[n] for n in state if places[n] == file})
    write_index(copy, places)
    return state, places


def write_tensors(file, tensors):
    save_file(tensors, file, metadata={"format": "pt"})


def write_index(folder, places):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def a_tensor_twice(folder, state, places):
    second = {n: state[n] for n, file in places.items() if file == "b.safetensors"}
    write_tensors(folder / "b.safetensors", second | {EMBEDDING: state[EMBEDDING] + 1})


def a_file_without_a_tensor(folder, state, places):
    write_tensors(folder / "a.safetensors", {"x": torch.zeros(1)})


def an_index_without_a_tensor(folder, state, places):
    write_tensors(folder / "b.safetensors", state)
    write_index(folder, {n: "b.safetensors" for n in places if n != EMBEDDING})


def a_second_checkpoint(folder, state, places):
    write_tensors(folder / "model.safetensors", state)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            a_tensor_twice,
            f"b.safetensors' has the tensor '{EMBEDDING}', which model.safetensors.index.json "
            "places in a.safetensors",
        ),
        (
            a_file_without_a_tensor,
            f"index.json' places the tensor '{EMBEDDING}' in a.safetensors, which lacks it",
        ),
        (
            an_index_without_a_tensor,
            f"b.safetensors' has the tensor '{EMBEDDING}', which model.safetensors.index.json "
            "does not name",
        ),
        (a_second_checkpoint, "has two checkpoints: model.safetensors, and the files of"),
    ],
)
@pytest.mark.parametrize("read", [open_engine, read_weights, read_stored])
def test_files_from_which_engines_would_read_different_weights_are_refused(
    copy, shards, change, says, read
):
    read(copy)

    change(copy, *shards)

    assert says in refusal(lambda: read(copy))


@pytest.mark.parametrize("read", [read_weights, read_stored])
def test_files_in_a_folder_of_the_checkpoint_are_read(copy, shards, read):
    (copy / "part").mkdir()
    (copy / "b.safetensors").rename(copy / "part" / "b.safetensors")
    places = {n: f.replace("b.", "part/b.") for n, f in shards[1].items()}
    write_index(copy, places)

    assert read(copy).keys() == shards[0].keys()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_broken_json_is_shown_at_its_line(copy, name):
    (copy / name).write_text('{\n  "vocab_size" 64\n}')

    assert refusal(lambda: open_engine(copy)) == (
        f"{copy / name}:2:16: this is not JSON: Expecting ':' delimiter\n"
        '    2 |   "vocab_size" 64\n'
        "                       ^\n"
        "  hint: copy the folder again, or write it anew with save_pretrained"
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.json", "[]"),
        ("config.json", '{"model_type": "no-such-model"}'),
        ("tokenizer.json", '{"model": {"type": "BPE"}}'),
        ("model.safetensors", "not a tensor in sight"),
        ("model.safetensors.index.json", '{"weights": {}}'),
    ],
)
def test_a_file_that_a_library_cannot_read_is_named_with_a_next_step(copy, name, text):
    (copy / name).write_text(text)

    said = refusal(lambda: open_engine(copy))

    assert said.startswith(f"'{copy / name}' ")
    assert said.endswith("hint: copy the folder again, or write it anew with save_pretrained")
    assert len(said.splitlines()) == 2


def test_a_truncated_checkpoint_is_named(copy):
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])

    assert refusal(lambda: open_engine(copy)).startswith(f"'{file}' cannot be read: ")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda state: state.pop("model.norm.weight"),
            "lacks the tensor 'model.norm.weight' (1 such)",
        ),
        (
            lambda state: state.update({"model.extra": torch.zeros(2)}),
            "has a tensor that config.json does not know, 'model.extra' (1 such)",
        ),
        (
            lambda state: state.update({"model.norm.weight": torch.zeros(2)}),
            "has another shape than config.json for 'model.norm.weight' (1 such)",
        ),
    ],
    ids=["missing", "unexpected", "shape"],
)
def test_weights_of_another_model_are_refused_by_name(copy, change, says):
    state = load_file(copy / "model.safetensors")
    change(state)
    save_file(state, copy / "model.safetensors", metadata={"format": "pt"})

    assert refusal(lambda: open_engine(copy)) == (
        f"the checkpoint '{copy}' {says}\n"
        "  hint: config.json and weights must come from one save_pretrained"
    )


def test_a_quantization_that_is_not_here_is_refused_before_anything_is_read():
    said = refusal(lambda: open_engine("no/such/folder", quantization="q8_0"))

    assert said.startswith("engine 'transformers' has no quantization 'q8_0'\n  hint: known: fp8_")


def test_a_model_that_does_not_divide_into_groups_is_refused(tmp_path):
    odd = save_model(tmp_path, intermediate_size=40)

    assert refusal(lambda: open_engine(odd, quantization="int4_g32")).startswith(
        "model.layers.0.mlp.down_proj: a format with blocks of 32 input features does not hold"
    )


def test_a_sequence_beyond_the_context_is_named_with_its_length(engine):
    batch = Batch((3, 4), ((5,), (5,) * 40), WIDTH, ((6,), (6,)))
    says = (
        "sequence 4 needs 52 tokens (40 of prompt and 12 new), and the model's context is 48\n"
        "  hint: shorten the prompt, or lower max_new_tokens"
    )

    assert refusal(lambda: engine.generate(batch, PLAIN, 0)) == says
    assert refusal(lambda: engine.score(batch, PLAIN, "prefill")) == says
    assert refusal(lambda: next(engine.logits(batch, "decode"))) == says


@pytest.mark.parametrize(
    ("prompt", "continuation", "says"),
    [
        ((), (6,), "has an empty prompt\n  hint: give its first token as the prompt"),
        (
            (5,),
            (99,),
            "has the token id 99, and the model's ids end at 63\n"
            "  hint: encode prompts with the tokenizer of this model",
        ),
        (
            (5,),
            (6,) * 13,
            "has 13 tokens to score in a batch of width 12\n"
            "  hint: the width of a batch is its longest continuation, or more",
        ),
    ],
    ids=["empty", "id", "width"],
)
def test_a_sequence_that_cannot_be_run_is_named(engine, prompt, continuation, says):
    batch = Batch((7, 8), ((5,), prompt), WIDTH, ((6,), continuation))

    assert refusal(lambda: engine.score(batch, PLAIN, "prefill")) == f"sequence 8 {says}"


# the laws of engines


@pytest.mark.slow
def test_a_throw_away_model_keeps_every_law_that_speaks_of_it(folder):
    report = check_engine(lambda: open_engine(folder), sequences=24)
    assert [f.law for f in report.those("skipped")] == ["top_is_the_head"]


@pytest.mark.slow
def test_the_shipped_model_keeps_the_laws_on_texts_and_through_a_worker():
    shipped = Path(__file__).parents[2] / "models" / "tiny-lm"
    kernel = Kernel(engine="transformers", model=str(shipped), batch_size=16)
    texts = ["Snow lay on the roofs.", "Wailvel lived near", "1 + 2 ="]
    report = check_engine(lambda: spawn(kernel, "infer"), texts, sequences=16, width=4)
    assert len(report.those("skipped")) == 1


OWN_STATES = {
    transformers.MambaForCausalLM: transformers.MambaConfig(
        vocab_size=VOCAB, hidden_size=32, state_size=8, num_hidden_layers=2, pad_token_id=0
    ),
    transformers.RwkvForCausalLM: transformers.RwkvConfig(
        vocab_size=VOCAB, hidden_size=32, attention_hidden_size=32, num_hidden_layers=2
    ),
}


@pytest.mark.parametrize("kind", OWN_STATES, ids=lambda kind: kind.__name__)
def test_a_model_that_keeps_its_own_state_is_scored_by_prefill_and_not_decoded(copy, kind):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind(OWN_STATES[kind]).eval()
    for file in ("model.safetensors", "config.json"):
        (copy / file).unlink()
    model.save_pretrained(copy)
    batch = Batch((0, 1), ((4, 5), (6, 7, 8)), 3, ((9, 10, 11), (12, 13)))
    engine = open_engine(copy)

    logp = engine.score(batch, PLAIN, "prefill").columns["logp"]
    with torch.no_grad():
        first = model(torch.tensor([[4, 5, 9, 10, 11]])).logits[0, 1:-1].log_softmax(-1)
    np.testing.assert_allclose(logp[:3], first[range(3), [9, 10, 11]], atol=1e-4)
    for decodes in (
        lambda: engine.score(batch, PLAIN, "decode"),
        lambda: engine.generate(launched(), PLAIN, 3),
    ):
        with pytest.raises(MeasurementError, match=f"{kind.__name__} takes no past_key_values"):
            decodes()


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ({"attention": "sdpa_cudnn"}, "has no sdpa_cudnn for this kernel"),
        ({"device": "cuda:99"}, "the kernel asks for device cuda:99, and torch"),
    ],
)
def test_a_backend_or_a_device_that_is_not_there_is_refused(folder, key, says):
    with pytest.raises(MeasurementError, match=says):
        open_engine(folder, **key).generate(launched(), PLAIN, 3)


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ({"attention": "sdpa_math"}, "no choice of the backend of its attention"),
        ({"device": "cuda"}, "no choice of its device here: device=cuda"),
    ],
)
def test_engines_without_backends_and_devices_refuse_them(key, says):
    with pytest.raises(MeasurementError, match=says):
        engines.open_engine(Kernel(engine="table", model="p.json", **key))


# a prefill in steps


@pytest.mark.sampled(4)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("size", [2, 5, 12, 40])
@PATHS
def test_a_prefill_in_steps_has_the_scores_of_one_at_once(folder, drawn, path, size, attention):
    """Of prompts of several lengths together, shorter and longer than a step."""
    in_steps = open_engine(folder, attention=attention, prefill_chunk=size)
    found, wanted = (
        engine.score(drawn, FILTERED, path)
        for engine in (in_steps, open_engine(folder, attention=attention))
    )
    for name in wanted.columns:
        np.testing.assert_allclose(found.columns[name], wanted.columns[name], atol=ROUNDING)
    logits = (np.concatenate([*e.logits(drawn, path)]) for e in (in_steps, open_engine(folder)))
    np.testing.assert_allclose(*logits, atol=ROUNDING)


def test_a_prefill_in_steps_keeps_no_logits_of_the_prompt(folder, monkeypatch):
    kept = []
    own = TransformersEngine._forward

    def forward(self, *args, **options):
        logits = own(self, *args, **options)
        kept.append(logits.shape[1])
        return logits

    monkeypatch.setattr(TransformersEngine, "_forward", forward)
    batch = Batch((0, 1), ((5,) * 30, (6,) * 7), 4, ((9, 8, 7, 6), (9, 8)))
    [*open_engine(folder, prefill_chunk=8).logits(batch, "prefill")]
    # columns 29 to 32 of the long text and 6, 7 of the short one; otherwise the one that is least
    assert kept == [2, 1, 1, 3, 1]


def test_steps_are_in_the_fingerprint_and_refused_elsewhere(folder):
    facts = open_engine(folder, prefill_chunk=8).describe().fingerprint
    assert facts["prefill_chunk"] == "8"
    assert "prefill_chunk" not in open_engine(folder).describe().fingerprint
    with pytest.raises(MeasurementError, match="no choice of the steps of a prefill"):
        engines.open_engine(Kernel(engine="table", model="p.json", prefill_chunk=8))
