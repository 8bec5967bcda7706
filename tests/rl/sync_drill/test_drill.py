# The drill on kernels that agree exactly: what it says is then exact as well.

import copy
import os
import signal
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from servanda.errors import Interrupted, MeasurementError  # noqa: E402
from servanda.rl.sync_drill.drill import preflight, restore  # noqa: E402
from servanda.rl.sync_drill.held_weights import shown_alone  # noqa: E402
from servanda.rl.sync_drill.plan import planned  # noqa: E402
from servanda.rl.sync_drill.response_slope import distance  # noqa: E402
from servanda.rl.sync_drill.sides import Sides  # noqa: E402
from servanda.rl.sync_drill.signals import TimeLimit  # noqa: E402
from servanda.rl.sync_drill.sparse_update import SYNCS  # noqa: E402
from servanda.rl.sync_drill.trainee import Trainee, forward_logprobs, probes  # noqa: E402
from servanda.rl.sync_drill.weight_snapshot import Weights  # noqa: E402
from servanda.runner.measurement import unwatched  # noqa: E402
from tests.rl.served_weights import small_model  # noqa: E402
from tests.rl.sync_drill.toys import Engine, Toy, bits, pair  # noqa: E402


def test_an_engine_that_gets_all_follows_exactly():
    trainee, _ = pair()

    result = preflight(trainee)

    assert result.outcome == "holds" and result.exit_code == 0 and result.cause == ""
    assert [group.name for group in result.groups] == [
        *("embed/lm_head", "norms.norm"),
        *("layers.0.attn", "layers.0.mlp", "layers.1.attn", "layers.1.mlp"),
    ]  # fmt: skip
    for group in result.groups:
        assert group.follow == pytest.approx(1, abs=1e-12) and group.residual < 1e-6
    assert result.found.distance == result.found.idle == result.poison.distance == 0
    assert result.returned == 0


@pytest.mark.parametrize(
    ("left_out", "cause", "deaf"),
    [
        (lambda _: True, "never_synced", 6),
        (lambda n: n.startswith("layers.1."), "one_layer", 2),
        (lambda n: ".1.mlp" in n, "one_mlp", 1),
        (lambda n: ".0.attn" in n, "one_attention", 1),
        (lambda n: "norm" in n, "norms_stale", 1),
    ],
)
def test_what_the_sync_leaves_out_is_deaf_exactly_and_named(left_out, cause, deaf):
    trainee, _ = pair(left_out)

    result = preflight(trainee)

    assert (result.outcome, result.exit_code, result.cause) == ("violated", 1, cause)
    assert [group.follow for group in result.groups].count(0.0) == deaf


def test_an_engine_that_began_with_other_weights_and_gets_none_is_named():
    trainee, engine = pair(lambda _: True)
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.copy_(torch.randn_like(parameter))

    result = preflight(trainee)

    assert result.found.floor > 1 and (result.outcome, result.cause) == ("violated", "never_synced")


@pytest.mark.parametrize("forgotten", [True, False])
def test_the_draft_of_speculation_is_drilled_as_a_trainee_of_its_own(forgotten):
    """One sync is for both models; it may forget the draft, and the target's drill holds."""
    target, draft = Toy(), Toy(layers=1, seed=1)
    of_target, of_draft = Engine(target), Engine(draft)

    def sync():
        of_target.sync()
        if not forgotten:
            of_draft.sync()

    assert preflight(Trainee(target, sync, of_target.score)).outcome == "holds"
    found = preflight(Trainee(draft, sync, of_draft.score))
    assert found.outcome == ("violated" if forgotten else "holds")
    assert found.cause == ("never_synced" if forgotten else "")


def test_a_head_that_is_tied_for_the_trainer_only_is_named():
    trainee, _ = pair(tied=False)

    result = preflight(trainee)

    assert result.cause == "tied_head_stale"
    follows = {part.name: part.follow for part in result.groups[0].parts}
    assert follows["embed.weight"] > 0.8 and follows["lm_head.weight"] < 0.2
    # the module is tied again
    assert trainee.module.lm_head.weight is trainee.module.embed.weight


def test_one_tensor_of_a_group_is_told_from_the_others():
    trainee, _ = pair(lambda name: name == "layers.0.mlp.2.weight")

    result = preflight(trainee)

    assert result.cause == "deaf"
    wrong = next(group for group in result.groups if group.mark == "violated")
    assert wrong.name == "layers.0.mlp" and [p.name for p in wrong.parts if p.deaf] == ["mlp.2"]


def test_many_layers_share_syncs_and_only_a_bad_block_is_taken_apart():
    trainee, engine = pair(lambda name: ".7.mlp" in name, layers=9)
    plan = planned(trainee)

    result = preflight(trainee)

    assert len(plan.groups) == 20 and plan.least == 3 + 6 + SYNCS
    assert result.cause == "one_mlp"
    assert [group.name for group in result.groups if group.deaf] == ["layers.7.mlp"]
    assert 3 + 6 < result.syncs == engine.synced < plan.most
    assert "layers.0-4.attn" in str(result)


class Hesitant(Engine):
    """Keeps one tensor, unless what is sent is farther from it than a limit."""

    def sync(self):
        kept = dict(self.model.named_parameters())["layers.7.mlp.2.weight"]
        sent, before = dict(self.trainer.named_parameters())["layers.7.mlp.2.weight"], kept.clone()
        super().sync()
        with torch.no_grad():
            if (sent - before).std() < 0.5 * before.std():
                kept.copy_(before)


@pytest.mark.parametrize("kind", [Engine, Hesitant])
def test_what_random_weights_show_of_each_tensor_is_looked_at_again_where_a_block_fails(kind):
    module, scored = Toy(layers=9), []
    engine = kind(module)

    def logprobs(rows):
        scored.append(rows)
        return forward_logprobs(module, rows)

    trainee = Trainee(module, engine.sync, engine.score, logprobs=logprobs)

    result = preflight(trainee)

    names = {name for name, _ in module.named_parameters() if ".layers" in f".{name}"}
    assert {*result.poison.shown} == names and f"one of {len(names)} tensors" in str(result)
    parts = {group.name: [part.name for part in group.parts] for group in result.groups}
    if kind is Hesitant:
        wrong = next(group for group in result.groups if group.mark == "violated")
        assert (wrong.name, wrong.lost) == ("layers.7.mlp", ("mlp.2",))
    else:
        assert result.outcome == "holds" and not parts["layers.7.mlp"]
        assert 0 <= len(scored) - planned(trainee).forwards < 40


def test_a_kind_of_tensors_that_random_weights_do_not_show_is_not_taken_as_shown():
    drill, _ = pair(layers=3)
    weights = Weights(drill.module)
    sides = Sides(drill, probes(drill, 0), 1, unwatched, TimeLimit(None))
    weights.poison()
    there_N = sides.train()
    lost = {}
    for name in weights.parameters:
        weights.settle([name])
        lost[name] = distance(sides.train(), there_N)
        weights.poison([name])
    layers = {name: size for name, size in lost.items() if name.startswith("layers.")}
    limit = sorted(layers.values())[len(layers) // 2]

    shown = shown_alone(weights, sides, there_N, limit)

    least = {}
    for name, size in layers.items():
        kind = name.split(".", 2)[2]
        least[kind] = min(size, least.get(kind, size))
    assert shown == {n for n in layers if least[n.split(".", 2)[2]] > limit} != set()


def test_a_cache_that_outlives_the_sync_is_told_from_a_sync_that_does_nothing():
    trainee, engine = pair()
    cache = {}

    def score(rows):
        key = str(rows)
        if key not in cache:
            cache[key] = engine.score(rows)
        return cache[key]

    result = preflight(Trainee(trainee.module, trainee.sync, score))

    assert result.cause == "stale_cache" and "prefix cache" in result.sentence


def test_a_sync_that_rounds_to_float8_is_named_even_if_it_did_so_before():
    trainee, engine = pair()

    def sync():
        engine.sync()
        with torch.no_grad():
            for parameter in engine.model.parameters():
                parameter.copy_(parameter.to(torch.float8_e4m3fn).double())

    sync()
    result = preflight(Trainee(trainee.module, sync, trainee.score))

    assert result.cause == "wrong_cast" and result.found.cast == "float8_e4m3fn"


def test_only_what_is_trained_is_changed_and_a_frozen_group_may_be_deaf():
    trainee, _ = pair(lambda name: "layers.0." in name)
    for name, parameter in trainee.module.named_parameters():
        parameter.requires_grad_("layers.1." in name)

    result = preflight(trainee)

    assert result.outcome == "holds"
    names = ["norms.norm", "layers.1.attn", "layers.1.mlp"]
    assert [group.name for group in result.groups] == names


def test_a_group_that_moves_nothing_is_inconclusive_never_a_pass():
    trainee, _ = pair()
    module = trainee.module.requires_grad_(False)
    module.unused = torch.nn.Linear(3, 3, bias=False).double()

    result = preflight(Trainee(module, lambda: None, trainee.score))

    assert (result.outcome, result.exit_code) == ("inconclusive", 3)
    assert "rest ? no effect" in str(result)


def test_a_stale_engine_that_the_first_sync_mends_holds_with_a_warning():
    trainee, engine = pair()
    with torch.no_grad():
        engine.model.embed.weight.mul_(2)

    result = preflight(trainee)

    assert result.outcome == "holds"
    assert "warning  the engine had other weights before the first sync" in str(result)


def test_dropout_is_off_while_scoring_and_every_mode_is_as_it_was():
    trainee, _ = pair()
    trainee.module.train()
    trainee.module.layers[0].eval()
    modes = [part.training for part in trainee.module.modules()]

    assert preflight(trainee).found.train_noise == 0
    assert [part.training for part in trainee.module.modules()] == modes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("renamed", "factor", "says"),
    [
        (("gate_proj", "up_proj"), 1.0, "mlp.gate_proj.weight and mlp.up_proj.weight"),
        (("k_proj", "v_proj"), 1.0, "self_attn.k_proj.weight and self_attn.v_proj.weight"),
        ((), 1.05, "model.norm.weight times 1.05"),
    ],
)
def test_what_the_engine_had_wrong_from_the_start_is_named(dtype, renamed, factor, says):
    module = small_model()
    engine = copy.deepcopy(module).to(dtype)

    @torch.no_grad()
    def sync():
        mine = dict(engine.named_parameters())
        for name, value in module.named_parameters():
            place = name
            for one, other in (renamed, renamed[::-1]) if renamed else ():
                place = name.replace(one, other) if one in name else place
            mine[place].copy_(value * (factor if name == "model.norm.weight" else 1.0))

    sync()
    result = preflight(Trainee(module, sync, lambda rows: forward_logprobs(engine, rows)))

    assert result.cause == ("misplaced" if renamed else "scaled")
    assert says in result.sentence and result.found.moved < 0.01


def test_dropout_in_the_trainers_own_scores_is_named_and_its_modes_are_used():
    trainee, _ = pair()
    module, trained = trainee.module.train(), []

    def logprobs(rows):
        trained.append(module.training)
        return forward_logprobs(module, rows)

    noisy = preflight(replace(trainee, logprobs=logprobs))
    (warning,) = noisy.warnings
    assert "dropout is active where they are computed" in warning and noisy.found.own_noise > 0.1
    assert (noisy.outcome, noisy.found.train_noise, trained[:3]) == (
        "holds",
        0,
        [True, True, False],
    )

    module.dropout.p, trained[:] = 0.0, []
    calm = preflight(replace(trainee, logprobs=logprobs))
    assert (calm.outcome, calm.warnings, {*trained}) == ("holds", (), {True})


class Count:
    """Fails at the k-th call."""

    def __init__(self, call, at, error):
        self.call, self.at, self.error, self.calls = call, at, error, 0

    def __call__(self, *args):
        self.calls += 1
        if self.calls == self.at:
            raise self.error
        return self.call(*args)


@pytest.mark.parametrize("at", range(1, 14))
def test_a_sync_that_throws_at_any_call_leaves_the_weights_as_they_were(at, tmp_path):
    trainee, _ = pair()
    before = bits(trainee.module)
    sync = Count(trainee.sync, at, RuntimeError("NCCL timeout"))

    with pytest.raises(MeasurementError, match="RuntimeError: NCCL timeout") as caught:
        preflight(Trainee(trainee.module, sync, trainee.score), journal=tmp_path / "j")

    assert bits(trainee.module) == before and not (tmp_path / "j").exists()
    message = str(caught.value)
    if at == 1:
        assert message.startswith("sync of unchanged weights: the sync raised")
        assert message.endswith("state: no weight was changed")
    elif at < 13:
        assert message.endswith("bit for bit, and synced to the engine once more")
    else:
        assert "do not sample from it before a sync succeeds" in message


def test_sigterm_unwinds_the_drill_and_then_reaches_whom_it_was_meant_for():
    trainee, _ = pair()
    before, came = bits(trainee.module), []
    handler = lambda *_: came.append(bits(trainee.module) == before)  # noqa: E731
    old = signal.signal(signal.SIGTERM, handler)
    calls = iter(range(99))

    def score(rows):
        if next(calls) >= 4:  # twice: the second one waits until the weights are back
            os.kill(os.getpid(), signal.SIGTERM)
        return trainee.score(rows)

    try:
        with pytest.raises(Interrupted):
            preflight(Trainee(trainee.module, trainee.sync, score))
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, old)
    assert came == [True]


def test_a_journal_that_was_left_is_refused_and_puts_the_weights_back(tmp_path):
    journal = tmp_path / "weights.journal"
    trainee, engine = pair()
    before = bits(trainee.module)
    kept = []

    def sync():  # what a kill leaves: the journal as it is while weights are changed
        kept.append(journal.read_bytes() if journal.exists() else b"")
        engine.sync()

    preflight(Trainee(trainee.module, sync, trainee.score), journal=journal)
    assert not journal.exists()
    assert kept[-1] == b""  # the weights were back before the last sync
    journal.write_bytes(kept[1])
    with torch.no_grad():
        trainee.module.embed.weight.fill_(7)

    with pytest.raises(MeasurementError, match=f"--restore {journal}"):
        preflight(trainee, journal=journal)
    restore(trainee, journal)

    assert bits(trainee.module) == before == bits(engine.model) and not journal.exists()


def test_a_journal_of_another_model_changes_nothing(tmp_path):
    from servanda.rl.sync_drill.parallel.weight_journal import write_journal
    from servanda.rl.sync_drill.weight_snapshot import Weights

    journal = tmp_path / "j"
    write_journal(journal, Weights(Toy(layers=3)).local.kept)
    trainee, _ = pair()
    before = bits(trainee.module)

    with pytest.raises(MeasurementError, match="no such parameter"):
        restore(trainee, journal)
    assert bits(trainee.module) == before and journal.exists()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda _: [[float("nan")] * 40] * 16, "row 1, token 2 a logprob of nan"),
        (lambda _: [[-float("inf")] * 40] * 16, "row 1, token 2 a logprob of -inf"),
        (lambda _: [[None] * 40] * 16, "row 1, token 2 a logprob of nan"),
        (lambda _: [[0.5] * 40] * 16, "row 1, token 2 a logprob of 0.5"),
        (lambda _: [[-1.0] * 41] * 16, "row 1 logprobs of shape (41,), and it has 41 tokens"),
        (lambda _: [[-1.0] * 40] * 3, "scored 3 rows, and was asked for 16"),
        (lambda _: None, "scored 0 rows, and was asked for 16"),
        (lambda _: [["x"] * 40] * 16, "row 1: these are no logprobs"),
    ],
)
def test_what_is_no_logprob_is_refused_by_its_place(answer, message):
    trainee, _ = pair()

    with pytest.raises(MeasurementError) as caught:
        preflight(Trainee(trainee.module, trainee.sync, answer))

    assert str(caught.value).startswith("as found: the engine") and message in str(caught.value)


@pytest.mark.parametrize(
    ("sync", "score", "found"),
    [
        (lambda _: None, None, "sync of unchanged weights: the sync raised TypeError"),
        (None, lambda _, __: [], "as found: score raised TypeError"),
    ],
)
def test_a_call_that_takes_other_arguments_is_told_what_it_is_given(sync, score, found):
    trainee, _ = pair()

    with pytest.raises(MeasurementError) as caught:
        preflight(Trainee(trainee.module, sync or trainee.sync, score or trainee.score))

    (problem,) = caught.value.problems
    assert problem.message.startswith(found)
    assert problem.message.endswith("state: no weight was changed")
    assert problem.hint == (
        "sync is called without arguments, score and logprobs with a list of token id rows"
    )


@pytest.mark.parametrize("token", [23, -100])
def test_a_token_that_the_vocabulary_lacks_is_refused_by_its_place(token):
    trainee, _ = pair()
    rows = [[1] * 80, [2, 3, token]]

    with pytest.raises(MeasurementError) as caught:
        preflight(Trainee(trainee.module, trainee.sync, trainee.score, tokens=rows))

    (problem,) = caught.value.problems
    assert problem.message == (
        f"row 2 of the probe tokens has token {token}, and the vocabulary has 23"
    )
    assert problem.hint == "use ids of the module's own tokenizer, without padding such as -100"


def test_a_journal_that_another_drill_writes_meanwhile_is_kept(tmp_path, monkeypatch):
    from servanda.rl.sync_drill.parallel import weight_journal

    journal, (trainee, engine), before = tmp_path / "j", pair(), []

    def late(path, kept, places):
        monkeypatch.undo()
        weight_journal.write_journal(path, kept)  # the other one's
        before.append(path.read_bytes())
        weight_journal.write_journal(path, kept)

    monkeypatch.setattr(weight_journal, "write_journal", late)
    with pytest.raises(MeasurementError, match="is there already"):
        preflight(trainee, journal=journal)

    assert before == [journal.read_bytes()] and [*tmp_path.iterdir()] == [journal]
    assert engine.synced == 0


def test_an_engine_that_is_not_deterministic_is_judged_by_its_own_noise():
    trainee, engine = pair()
    rng = np.random.default_rng(0)

    def score(rows):
        return [logp_T - rng.exponential(0.02, logp_T.shape) for logp_T in engine.score(rows)]

    result = preflight(Trainee(trainee.module, trainee.sync, score))

    assert result.found.floor == pytest.approx(0.02, rel=0.2)
    assert (result.outcome, result.warnings) == ("holds", ()), str(result)


def test_probes_that_are_too_short_or_have_no_vocabulary_are_refused():
    trainee, _ = pair()
    plain = torch.nn.Linear(2, 2)

    with pytest.raises(
        MeasurementError, match="too few probe tokens: 4 are scored, and 64 are needed"
    ):
        preflight(Trainee(trainee.module, trainee.sync, trainee.score, tokens=[[1, 2, 3]] * 2))
    with pytest.raises(MeasurementError, match="row 1 of the probe tokens has 1"):
        preflight(Trainee(trainee.module, trainee.sync, trainee.score, tokens=[[1]]))
    with pytest.raises(MeasurementError, match="vocabulary size of Linear is unknown"):
        preflight(Trainee(plain, trainee.sync, trainee.score))
    plain.requires_grad_(False)
    with pytest.raises(MeasurementError, match="no parameter of Linear has requires_grad"):
        preflight(Trainee(plain, trainee.sync, trainee.score, tokens=[[1] * 99]))
