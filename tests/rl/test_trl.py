# TRL's batches, as a real run had them, through the mixin; tests/real_rl/test_trl.py is the run.

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from servanda.errors import ContractError, EvidenceError, MeasurementError
from servanda.rl import DraftCounts, Monitor, package_version, read_state
from servanda.rl.dumps.formats import open_dump
from servanda.rl.package_version import built
from servanda.rl.trl import Dumping, Monitored, rollouts, trainee
from servanda.rl.trl_setup import groups_of
from tests.rl.monitor.recorded import Call, Trainer
from tests.transcripts import blocks

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

CONTRACT = """\
apiVersion: servanda.dev/v1alpha1
kind: KernelContract
metadata: {{name: grpo}}
kernels:
  train: {{engine: external, title: trainer}}
  infer: {{engine: external, title: rollouts}}
weights: {{changes: every_step}}
claim: realised
workload: {{source: trainer, sampling: {{max_new_tokens: 12}}}}
slices:
  - {{name: domain, split: labels.domain}}
gradient: {{weighting: {{tis: 1.02}}}}
statistical:
  - {{id: gradient, metric: tv, aggregate: mean, at_most: {limit}, slices: [domain]}}
observability:
  clauses:
    - {{id: finite, metric: valid_ratio, at_least: 0.999}}
escalation: {rules}
promotion: {{offline: {{prompt_groups: [1, 1000000]}}}}
"""
NOTHING = "[]"
CORRECT = "[{when: {clause: finite, is_not: error}, do: [correct]}]"
MASK = "[{when: {clause: gradient, is: violated}, do: [mask]}]"
HALT = "[{when: {clause: gradient, is: violated}, do: [halt]}]"
ROOT = Path(__file__).parents[2]
SLICES = {"domain": "labels.domain"}


class Kept(Monitored, Trainer): ...


@pytest.fixture
def held(tmp_path):
    """A trainer of one recorded call, held to a contract."""

    def make(kind, rules=NOTHING, limit=0.9, stop=False, slices=SLICES, **settings):
        path = tmp_path / "grpo.yaml"
        path.write_text(CONTRACT.format(rules=rules, limit=limit))
        own = {name: settings.pop(name) for name in ("state", "dump", "sample") if name in settings}
        monitor = Monitor(path, stop=stop, **own)
        return Kept(Call(kind), monitor=monitor, slices=slices, **settings)

    return make


def two_ranks():
    """The accelerator of the first of two ranks."""
    return SimpleNamespace(
        num_processes=2, process_index=0, is_main_process=True, gather=lambda value: value
    )


def test_trls_own_weights_are_held_to_the_declared_ones(tmp_path):
    """The recorded run caps its weights per token, but above the declared 1.02."""
    path = tmp_path / "grpo.yaml"
    clause = "    - {id: used, metric: declared_weight_ratio, at_least: 0.99}\n"
    text = CONTRACT.format(rules=HALT, limit=0.9)
    at = text.index("    - {id: finite")
    path.write_text(text[:at] + clause + text[at:])
    trainer = Kept(Call("vllm"), monitor=Monitor(path), slices=SLICES)
    trainer.generate()

    assert logged(trainer)["servanda/exit_code"] == [1.0]
    weight_N = trainer.call.out["importance_sampling_ratio"][trainer.call.mask_BT == 1]
    assert logged(trainer)["servanda/loss/declared"] == [pytest.approx((weight_N <= 1.02).mean())]
    assert logged(trainer)["servanda/loss/mean_weight"] == [pytest.approx(weight_N.mean())]


def logged(trainer):
    return dict(trainer._metrics["train"])


@pytest.mark.parametrize("kind", ["engine", "vllm", "environment"])
def test_what_is_logged_is_what_the_recorded_logprobs_say(held, kind):
    trainer = held(kind)
    trainer.generate()
    call = trainer.call
    d_N = np.log(call.ratio_BT)[call.mask_BT == 1]
    assert logged(trainer)["servanda/abs_log_ratio_nats"] == [
        pytest.approx(np.abs(d_N).mean(), rel=1e-5)
    ]
    assert logged(trainer)["servanda/observed_tokens"] == [call.mask_BT.sum()]
    assert logged(trainer)["servanda/coverage"] == logged(trainer)["servanda/active"] == [1.0]
    assert {name.split("/")[0] for name in logged(trainer)} == {"servanda"}
    assert not any("has no slice" in note for note in trainer.monitor.notes)


def test_logprobs_that_trl_did_not_need_are_computed_as_trl_would(held):
    trainer = held("engine")
    trainer.generate()
    ((ids, attended, width, batch_size),) = trainer.asked
    out = trainer.call.out
    np.testing.assert_array_equal(ids, np.hstack([out["prompt_ids"], out["completion_ids"]]))
    np.testing.assert_array_equal(attended, np.hstack([out["prompt_mask"], out["completion_mask"]]))
    assert (width, batch_size) == (12, 16)


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
def test_a_share_of_the_sequences_is_scored_and_judged(tmp_path, share):
    trainer = Kept(Call("engine"), monitor=Monitor("trl"), score_share=share)
    full = trainer.call.scored
    rows = []

    def forward(model, ids, attended, width, batch_size):
        whole = np.hstack([trainer.call.out["prompt_ids"], trainer.call.out["completion_ids"]])
        at = [int(np.flatnonzero((whole == row).all(axis=1))[0]) for row in ids.numpy()]
        rows.extend(at)
        return torch.tensor(full[at]), None

    trainer._get_per_token_logps_and_entropies = forward
    trainer.generate()

    assert 0 < len(rows) <= math.ceil(share * len(full))
    log = logged(trainer)
    mask_BT = trainer.call.mask_BT
    assert log["servanda/observed_tokens"] == [mask_BT[rows].sum()]
    assert (log["servanda/share"], log["servanda/coverage"]) == ([len(rows) / len(full)], [1.0])
    d_BT = np.abs(np.log(trainer.call.ratio_BT))
    expected = d_BT[rows][mask_BT[rows] == 1].mean()
    assert log["servanda/abs_log_ratio_nats"] == [pytest.approx(expected, rel=1e-5)]


def test_the_logprobs_of_the_loss_are_judged_where_the_contract_only_judges():
    trainer = Kept(Call("engine"), monitor=Monitor("trl"))
    out = trainer.generate()
    assert not trainer.asked and not logged(trainer)
    trainer.learn(out)
    assert len(trainer.asked) == 2  # the two losses
    log, mask_BT = logged(trainer), trainer.call.mask_BT
    d_BT = np.abs(np.log(trainer.call.ratio_BT))
    mean = pytest.approx(d_BT[mask_BT == 1].mean(), rel=1e-5)
    assert log["servanda/abs_log_ratio_nats"] == [mean]
    assert log["servanda/observed_tokens"] == [mask_BT.sum()]
    assert log["servanda/active"] == log["servanda/coverage"] == [1.0]
    assert not {"servanda/share", "servanda/score_seconds_share"} & {*log}
    trainer.end_step()
    assert log == logged(trainer)


def test_a_run_whose_losses_are_judged_stops_after_that_step(held):
    trainer = held("engine", rules=HALT, limit=0.1, stop=True)
    trainer.call.scored -= 4.0
    out = trainer.generate()
    trainer.learn(out)
    assert trainer.end_step().should_training_stop


def test_parts_of_a_generation_after_the_update_are_not_judged():
    trainer = Kept(Call("engine"), monitor=Monitor("trl"))
    out = trainer.generate()
    rows = trainer.learn(out, of=1)[:8]
    assert not logged(trainer)
    trainer.end_step()
    log, mask_BT = logged(trainer), trainer.call.mask_BT
    assert log["servanda/observed_tokens"] == [mask_BT[rows].sum()]
    assert (log["servanda/share"], log["servanda/coverage"]) == ([0.5], [1.0])
    assert log["servanda/observed_sequences"] == [8]


def test_a_step_whose_losses_were_not_seen_is_an_error():
    trainer = Kept(Call("engine"), monitor=Monitor("trl"))
    trainer.generate()
    with pytest.raises(MeasurementError) as caught:
        trainer.end_step()
    assert str(caught.value) == (
        "step 2 ended without a loss whose logprobs were seen\n"
        "  hint: something replaced GRPOTrainer._compute_loss, or the batches that it gets: pass "
        "score_share=0.06, and the trainer scores that share of the sequences"
    )


@pytest.mark.parametrize(
    ("rules", "settings", "scored"),
    [
        (CORRECT, {}, 16),
        (MASK, {}, 1),  # 0.06 of 16, at least one
        (MASK, {"score_share": 0.5}, 8),
        (NOTHING, {}, 16),  # without rules, the declared weighting is applied
        (HALT, {}, None),
        (HALT, {"score_share": 0.5}, 8),
        (HALT, {"use_liger_kernel": True}, 1),
    ],
)
def test_only_a_contract_that_acts_on_tokens_takes_a_forward_pass(held, rules, settings, scored):
    trainer = held("engine", rules=rules, **settings)
    trainer.generate()
    assert [len(ids) for ids, *_ in trainer.asked] == ([] if scored is None else [scored])


def test_the_seconds_of_a_forward_pass_are_logged_as_a_share_of_the_step(held):
    trainer = held("engine", rules=MASK)
    trainer.generate()
    assert "servanda/score_seconds_share" not in logged(trainer)
    trainer.generate()
    (share,) = logged(trainer)["servanda/score_seconds_share"]
    assert 0 < share < 1


def test_the_verdict_says_how_many_sequences_it_is_on(held):
    trainer = held("engine", rules=HALT, score_share=0.5)
    steps, observe = [], trainer.monitor.observe
    trainer.monitor.observe = lambda *a, **k: steps.append(observe(*a, **k)) or steps[-1]
    trainer.generate()
    texts = [spot.text for spot in steps[0].verdict.blind_spots]
    assert "judged on 8 of 16 sequences, selected before scoring" in texts
    assert "judged on 8 of 16 sequences, selected before scoring" in str(steps[0])


def test_a_contract_that_corrects_every_token_takes_no_share(held):
    with pytest.raises(ContractError, match="the contract says correct, which needs every token"):
        held("engine", rules=CORRECT, score_share=0.5)
    with pytest.raises(ContractError, match="score_share is 0"):
        held("engine", score_share=0)


def test_a_trl_without_the_methods_that_are_overridden_is_refused_at_once():
    class Old(Trainer):
        _get_per_token_logps_and_entropies = property()  # an attribute that is not there

    class Held(Monitored, Old): ...

    with pytest.raises(MeasurementError, match=r"no Held\._get_per_token_logps_and_entr"):
        Held(Call("engine"), monitor=Monitor("trl"))


@pytest.mark.parametrize(
    ("found", "refused"), [("1.2.0", 1), ("1.8.0", 0), ("1.99", 0), ("2.0.0", 1)]
)
def test_an_unsupported_trl_is_refused_with_its_version_and_the_next_move(
    monkeypatch, found, refused
):
    """TRL 1.2 failed in the middle of a step: "not enough values to unpack"."""

    class OfTrl(Trainer):
        __module__ = "trl.trainer.grpo_trainer"

    class Held(Monitored, OfTrl): ...

    monkeypatch.setattr(package_version, "version", lambda _: found)
    if not refused:
        Held(Call("engine"), monitor=Monitor("trl"))
        return
    with pytest.raises(MeasurementError) as caught:
        Held(Call("engine"), monitor=Monitor("trl"))
    assert str(caught.value) == (
        f"TRL {found} is installed, and its batches may mean something else\n"
        "  hint: Servanda supports TRL 1.8 to 1.x, tested with 1.16.0: pip install trl==1.16.0"
    )


def test_a_trainer_that_returns_micro_batches_is_refused_with_the_next_move(monkeypatch):
    monkeypatch.setattr(
        Trainer, "_generate_and_score_completions", lambda *_: [{"completion_mask": 1}]
    )
    with pytest.raises(MeasurementError) as error:
        Kept(Call("engine"), monitor=Monitor("trl")).generate()
    said = str(error.value)
    assert "returned a list, and not TRL's batch" in said and "ms-swift" in said
    assert "hint: call Monitor.observe for each micro-batch" in said


def test_steps_have_the_number_that_trl_logs(held, tmp_path):
    trainer = held("engine", state=tmp_path / "steps.jsonl")
    trainer.generate()
    (read,) = read_state(tmp_path / "steps.jsonl")
    assert read.step == trainer.call.step + 1


def test_a_sample_of_the_sequences_has_their_prompts(held, tmp_path):
    """TRL pads prompts on the left; a dump has none of the padding."""
    trainer = held("engine", dump=tmp_path / "kept", sample=1.0)
    trainer.generate()
    out, mask_BT = trainer.call.out, trainer.call.mask_BT
    (rollouts,) = open_dump(tmp_path / "kept").read()
    assert rollouts.step == trainer.call.step + 1
    wanted = [
        [*prompt[there == 1], *completion[: np.flatnonzero(mask).max() + 1]]
        for prompt, there, completion, mask in zip(
            out["prompt_ids"], out["prompt_mask"], out["completion_ids"], mask_BT, strict=True
        )
    ]
    found = np.split(rollouts.token_N, np.cumsum(rollouts.length_S)[:-1])
    assert sorted(map(list, found)) == sorted(wanted)
    assert not rollouts.mask_N[0]


def test_every_generation_of_a_step_is_dumped_or_it_is_an_error(tmp_path):
    class Dumped(Dumping, Trainer): ...

    trainer = Dumped(Call("vllm"), dump=tmp_path / "all", slices=SLICES)
    trainer.generate()
    trainer.generate()  # of one update
    (rollouts,) = open_dump(tmp_path / "all").read()
    assert (rollouts.step, len(rollouts)) == (trainer.call.step + 1, 2 * len(trainer.call.mask_BT))
    assert {"domain", "rank"} <= rollouts.labels.keys()
    trained = np.concatenate([rollouts.logp_train_N[rollouts.mask_N]])
    mask_BT = trainer.call.mask_BT == 1
    np.testing.assert_allclose(
        np.sort(trained), np.sort(np.tile(trainer.call.logp_train_BT[mask_BT], 2)), rtol=1e-6
    )
    trainer.model.training = False
    trainer.generate()  # an evaluation
    assert len(list((tmp_path / "all").glob("*.parquet"))) == 2
    for missing, side in (
        ("old_per_token_logps", "trainer"),
        ("sampling_per_token_logps", "sampl"),
    ):
        other = Dumped(Call("vllm"), dump=tmp_path / side)
        other.call.out[missing] = np.full_like(other.call.out[missing], np.nan)
        with pytest.raises(MeasurementError, match=f"no logprobs of the {side}"):
            other.generate()
        del other.call.out[missing]
        with pytest.raises(MeasurementError, match=f"no logprobs of the {side}"):
            other.generate()
        assert not (tmp_path / side).exists()


def test_the_hook_fills_what_trl_knows_of_the_engine(held, tmp_path):
    def labels(trainer):
        (rollouts,) = open_dump(trainer.folder).read()
        return {name: {*values} for name, values in rollouts.labels.items()}

    def kept(name, **settings):
        trainer = held("vllm", dump=tmp_path / name, sample=1.0, **settings)
        trainer.folder = tmp_path / name
        trainer.generate()
        return labels(trainer)

    found = kept("colocate", vllm_mode="colocate", _last_loaded_step=3)
    domains = {"domain": found["domain"]}
    assert found == domains | {"rank": {"0"}, "replica": {"0"}, "weight_version": {"3"}} | (
        {"engine": {built("vllm")}} if built("vllm") else {}
    )
    # one server behind all ranks says neither its version nor which of its replicas answered
    assert kept("server", vllm_mode="server") == domains | {"rank": {"0"}}


def test_drafts_are_read_once_a_step_by_the_main_process(held):
    class Meter:
        problem = ""

        def read(self):
            return DraftCounts(100, 300, 150, (80, 50, 20))

    trainer = held("engine", drafts=Meter())
    trainer.generate()
    assert logged(trainer)["servanda/draft_acceptance"] == [0.5]
    other = held(
        "engine",
        drafts=Meter(),
        accelerator=SimpleNamespace(
            num_processes=1, process_index=1, is_main_process=False, gather=lambda value: value
        ),
    )
    other.generate()
    assert "servanda/draft_acceptance" not in logged(other)


def test_nothing_is_done_to_a_batch_unless_the_contract_says_so(held):
    trainer = held("vllm", rules="[{when: {clause: finite, is: error}, do: [correct]}]")
    out = trainer.generate()
    assert out.keys() == trainer.call.out.keys()
    for name, values in trainer.call.out.items():
        np.testing.assert_array_equal(out[name].numpy(), values)
    assert not trainer.asked  # logprobs that are there are not computed again


def test_correct_puts_the_declared_weights_where_trl_has_its_own(held):
    trainer = held("vllm", rules=CORRECT)
    out = trainer.generate()
    psi_BT = np.minimum(trainer.call.ratio_BT, 1.02) * trainer.call.mask_BT
    np.testing.assert_allclose(out["importance_sampling_ratio"], psi_BT, rtol=1e-5)
    np.testing.assert_array_equal(out["advantages"], trainer.call.out["advantages"])


def test_correct_weighs_advantages_where_trl_weighs_nothing(held):
    trainer = held("engine", rules=CORRECT)
    out = trainer.generate()
    psi_BT = np.minimum(trainer.call.ratio_BT, 1.02) * trainer.call.mask_BT
    wanted_BT = trainer.call.out["advantages"][:, None] * psi_BT
    np.testing.assert_allclose(out["advantages"], wanted_BT, rtol=1e-5)
    assert "importance_sampling_ratio" not in out


def test_a_loss_that_multiplies_the_weights_of_a_row_gets_1_outside_the_loss(held):
    """vespo takes the log of each, padding and all: a 0 there would take the row's weight away."""
    trainer = held("environment", rules=CORRECT, loss_type="vespo")
    out = trainer.generate()
    mask_BT = trainer.call.mask_BT == 1
    assert not mask_BT.all()
    wanted_BT = np.where(mask_BT, np.minimum(trainer.call.ratio_BT, 1.02), 1.0)
    np.testing.assert_allclose(out["importance_sampling_ratio"], wanted_BT, rtol=1e-5)
    np.testing.assert_array_equal(out["advantages"], trainer.call.out["advantages"])


@pytest.fixture
def masked(held):
    """A trainer whose slice `prose` is far beyond its limit."""
    trainer = held("engine", rules=MASK, limit=0.1, score_share=1)
    prose_B = np.array([row["labels.domain"] == "prose" for row in trainer.call.rows])
    assert prose_B.any() and not prose_B.all()
    trainer.call.scored = trainer.call.scored - 4.0 * prose_B[:, None].astype(np.float32)
    return trainer, prose_B


def test_mask_leaves_a_red_slice_out_of_the_loss(masked):
    trainer, prose_B = masked
    out = trainer.generate()
    kept_BT = trainer.call.mask_BT * ~prose_B[:, None]
    np.testing.assert_array_equal(out["completion_mask"] * out["tool_mask"], kept_BT)
    assert out["num_items_in_batch"] == kept_BT.sum()
    # the completion mask is TRL's attention mask too: it stays
    np.testing.assert_array_equal(out["completion_mask"], trainer.call.out["completion_mask"])


def test_mask_leaves_out_sequences_of_a_red_slice_that_were_not_scored(held):
    trainer = held("engine", rules=MASK, limit=0.2, score_share=0.5)
    prose_B = np.array([row["labels.domain"] == "prose" for row in trainer.call.rows])
    trainer.call.scored = trainer.call.scored - 4.0 * prose_B[:, None].astype(np.float32)
    out = trainer.generate()
    kept_BT = trainer.call.mask_BT * ~prose_B[:, None]
    np.testing.assert_array_equal(out["completion_mask"] * out["tool_mask"], kept_BT)
    ((ids, *_),) = trainer.asked
    assert len(ids) == 8 and logged(trainer)["servanda/share"] == [0.5]


@pytest.mark.parametrize("stop", [True, False])
def test_a_run_stops_where_and_only_where_it_is_told_to(held, stop):
    trainer = held("vllm", rules=HALT, limit=0.1, stop=stop)
    trainer.call.out["old_per_token_logps"] -= 4.0
    trainer.generate()
    assert trainer.end_step().should_training_stop is stop
    assert trainer.monitor.would_have_stopped == 2  # as TRL numbers it


def test_an_evaluation_is_not_observed(held):
    trainer = held("engine")
    trainer.model.training = False
    trainer.generate()
    assert not logged(trainer) and not trainer.asked


def test_a_step_that_goes_by_unseen_is_an_error(held):
    with pytest.raises(MeasurementError) as caught:
        held("engine").end_step()
    assert str(caught.value) == (
        "step 1 ended without a batch for the monitor\n"
        "  hint: something replaced GRPOTrainer._generate_and_score_completions, as Unsloth does: "
        "patch before the class is derived, or train without it"
    )


def test_a_trainer_that_draws_from_its_own_module_is_refused(held):
    with pytest.raises(MeasurementError) as caught:
        held("engine", rollout_func=None)
    assert str(caught.value) == (
        "TRL samples from the module that it trains (use_vllm=False), so the tokens have no "
        "sampler's logprobs: nothing can be compared\n"
        "  hint: set use_vllm=True, or rollout_func=servanda.rl.trl.rollouts(engine)"
    )


@pytest.mark.parametrize(
    ("kind", "values", "said"),
    [
        (
            "vllm",
            np.nan,
            "every logprob of the sampler is NaN: nothing can be compared\n"
            "  hint: find out why the engine scores its own tokens as NaN; start a server with "
            "--logprobs-mode processed_logprobs",
        ),
        ("vllm", None, "the batch has no logprobs of the sampler"),
        (
            "engine",
            None,
            "rollout_func returned no logprobs: nothing can be compared\n"
            "  hint: return in `logprobs` the logprob that each token was sampled with",
        ),
    ],
)
def test_logprobs_that_are_all_nan_or_missing_are_an_error_and_not_agreement(
    held, kind, values, said
):
    trainer = held(kind)
    if values is None:
        del trainer.call.out["sampling_per_token_logps"]
    else:
        trainer.call.out["sampling_per_token_logps"][:] = values
    with pytest.raises(MeasurementError) as caught:
        trainer.generate()
    assert str(caught.value).startswith(said)


def test_some_nan_is_counted_as_missing(held):
    trainer = held("vllm")
    trainer.call.out["sampling_per_token_logps"][:4] = np.nan
    trainer.generate()
    assert logged(trainer)["servanda/coverage"] == [0.75]
    assert logged(trainer)["servanda/exit_code"] == [4.0]


def test_completions_of_one_prompt_are_one_group(held):
    trainer, seen = held("engine"), {}
    observe = trainer.monitor.observe
    trainer.monitor.observe = lambda *a, **k: (seen.update(k), observe(*a, **k))[1]
    trainer.generate()
    prompts = [row["prompt"] for row in trainer.call.rows]
    pairs = {*zip(prompts, seen["groups"], strict=True)}
    assert len(pairs) == len({*prompts}) == len({*seen["groups"]}) > 1


def test_a_prompt_is_one_group_under_any_padding_and_its_order_counts():
    ids = torch.tensor([[0, 0, 5, 7, 9], [5, 7, 9, 0, 0], [5, 9, 7, 0, 0], [0, 5, 7, 9, 9]])
    there = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [0, 1, 1, 1, 1]])
    first, same, turned, longer = groups_of({"prompt_ids": ids, "prompt_mask": there})
    assert first == same and len({first, turned, longer}) == 3


def test_a_column_that_is_not_there_is_named(held):
    with pytest.raises(EvidenceError) as caught:
        held("engine", slices=("task",)).generate()
    assert str(caught.value) == (
        "no row of the batch has the column 'task' that slices= names\n"
        "  hint: the data set has the columns answer, group, labels.domain, prompt"
    )


def test_all_ranks_are_heard_where_there_are_several(held, monkeypatch):
    """One rank is told to halt, so every rank does."""
    import servanda.rl.trl as module

    several = two_ranks()
    sent = []

    def gathered(value):
        sent.append(value)
        return [value, True] if isinstance(value, bool) else [value]

    monkeypatch.setattr(module, "gathered", gathered)
    trainer = held("engine", accelerator=several)
    trainer.generate()
    assert trainer.end_step().should_training_stop
    assert {type(value).__name__ for value in sent} == {"bool", "Opening", "Part"}


def test_a_rank_whose_rows_lack_a_column_does_not_leave_the_others_waiting(held, monkeypatch):
    import servanda.rl.trl as module

    several = two_ranks()
    sent = []
    monkeypatch.setattr(module, "gathered", lambda value: sent.append(value) or [value])
    with pytest.raises(EvidenceError, match="no row of the batch has the column 'task'"):
        held("engine", accelerator=several, slices=("task",)).generate()
    assert sent[-1].refused.startswith("no row of the batch has the column 'task'")


# the examples


@pytest.mark.parametrize("name", ["trl_grpo.py", "trl_preflight.py"])
def test_the_page_prints_an_example_of_25_lines_as_it_is(name):
    text = (ROOT / "examples" / name).read_text(encoding="utf-8")
    assert text in blocks(ROOT / "docs" / "how-to" / "trl.md", "py")
    assert len(text.splitlines()) <= 25


def test_the_contract_of_the_example_is_one_that_a_monitor_takes():
    assert Monitor(ROOT / "examples" / "grpo.yaml").contract.metadata.name == "grpo"


# the engine of a trainer


def test_a_trainer_without_an_engine_has_nothing_to_sync():
    trainer = Trainer(Call("engine"), rollout_func=None)
    with pytest.raises(ContractError) as caught:
        trainee(trainer)
    assert str(caught.value) == (
        "there is nothing to sync: TRL samples from the module that it trains (use_vllm=False)\n"
        "  hint: the sync test needs a trainer with an engine of its own: use_vllm=True, or "
        "rollout_func=servanda.rl.trl.rollouts(engine)"
    )


def test_an_engine_or_a_rollout_function_of_ones_own_that_cannot_be_synced_is_refused():
    def draw(prompts, trainer): ...

    with pytest.raises(ContractError, match="rollout_func is draw, and Servanda does not know how"):
        trainee(Trainer(Call("engine"), rollout_func=draw))
    with pytest.raises(ContractError, match="SimpleEngine cannot take over a trainer's weights"):
        rollouts(type("SimpleEngine", (), {})())
