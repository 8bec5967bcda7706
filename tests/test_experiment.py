# The experiment: its enumeration against brute force, and a run that can be repeated.

import dataclasses
import itertools
import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from benchmarks.experiment import pilot, truth  # noqa: E402
from benchmarks.experiment.adapter import with_adapter  # noqa: E402
from benchmarks.experiment.policy import logp_after, logprobs_of  # noqa: E402
from benchmarks.experiment.record import RESULTS, Run, read_run, read_runs, write_run  # noqa: E402
from benchmarks.experiment.settings import Settings, full  # noqa: E402
from benchmarks.experiment.tree import ModelSteps, grow  # noqa: E402
from benchmarks.experiment.watching import CONTRACT  # noqa: E402
from benchmarks.experiment.weights import WEIGHTINGS  # noqa: E402

from servanda.engines.weight_sync import WeightSync  # noqa: E402
from servanda.theory.bounds.gradient import group_advantage_bound  # noqa: E402

VOCABULARY, END, WIDTH, GROUP = 5, 4, 3, 4
PROMPTS = [(0, 1, 2), (2, 3, 1)]


def toy(seed):
    """A causal model of five tokens, in float64; its logits are far apart."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        initializer_range=0.8,
        attn_implementation="eager",
    )
    return transformers.LlamaForCausalLM(config).double().eval()


def reward(prompt, answer):
    return float((sum(answer) + prompt) % 3 == 0)


def answers():
    """Every answer: those that end, and those that are cut."""
    for length in range(1, WIDTH + 1):
        for body in itertools.product(range(VOCABULARY - 1), repeat=length - 1):
            yield (*body, END)
    yield from itertools.product(range(VOCABULARY - 1), repeat=WIDTH)


def logp(model, prompt, answers):
    """Of each token of each answer, by one plain forward pass over whole rows; [S, WIDTH]."""
    rows = [[*prompt, *answer, *[0] * (WIDTH - len(answer))] for answer in answers]
    logp_STV = model(torch.tensor(rows)).logits.log_softmax(-1)[:, len(prompt) - 1 : -1]
    token_SW1 = torch.tensor(rows)[:, len(prompt) :, None]
    written_SW = torch.arange(WIDTH) < torch.tensor([[len(answer)] for answer in answers])
    return torch.where(written_SW, logp_STV.gather(-1, token_SW1)[..., 0], 0.0)


def gradient(scalar, model):
    return torch.cat(
        [g.ravel() for g in torch.autograd.grad(scalar, [*model.parameters()], retain_graph=True)]
    )


@pytest.fixture(scope="module")
def enumerated():
    """Two toys, the tree of all answers, and what is worked out from it."""
    train, infer = toy(1), toy(2)
    tree = grow(
        ModelSteps(train, 1.0),
        ModelSteps(infer, 1.0),
        PROMPTS,
        reward,
        ends=(END,),
        width=WIDTH,
        least=0.0,
        breadth=1000,
    )
    return train, infer, tree, truth.Gradients(tree, GROUP)


def brute_force(train, infer, weigh):
    """The gradients of sum Q A sum w log p over answers, and of sum P A sum log p."""
    of_q, of_p, every = 0.0, 0.0, [*answers()]
    for number, prompt in enumerate(PROMPTS):
        p_SW, q_SW = logp(train, prompt, every), logp(infer, prompt, every).detach()
        right = [reward(number, y) if y[-1] == END else 0.0 for y in every]
        P_S, Q_S = p_SW.detach().sum(1).exp(), q_SW.sum(1).exp()
        given = truth.expected_advantage(float(Q_S @ torch.tensor(right).double()), GROUP)
        A_S = torch.tensor([given[int(r)] for r in right])
        w_SW = torch.from_numpy(weigh((p_SW.detach() - q_SW).exp().numpy()))
        of_q = of_q + (Q_S * A_S * (w_SW * p_SW).sum(1)).sum()
        of_p = of_p + (P_S * A_S * p_SW.sum(1)).sum()
    return gradient(of_q / len(PROMPTS), train), gradient(of_p / len(PROMPTS), train)


@pytest.mark.parametrize("name", [*WEIGHTINGS])
def test_enumerated_gradients_are_those_of_brute_force(enumerated, name):
    train, infer, tree, found = enumerated
    assert tree.rest_p == pytest.approx(0, abs=1e-12) == tree.rest_q

    vectors = truth.in_parameters(found, train, PROMPTS, 1.0)

    by_q, by_p = brute_force(train, infer, WEIGHTINGS[name].weight)
    torch.testing.assert_close(vectors[name], by_q, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(vectors["sequence"], by_p, rtol=1e-5, atol=1e-6)


def test_with_importance_weights_the_token_level_bias_is_nothing(enumerated):
    *_, tree, found = enumerated
    for node in tree.nodes:
        key = (node.prompt, *node.tokens)
        w_V = node.p_V / node.q_V
        inside = w_V <= 2.0
        exact = found.coefficients["token"][key]
        assert found.coefficients["tis"][key][inside] == pytest.approx(exact[inside])


@pytest.mark.parametrize("name", [*WEIGHTINGS])
def test_the_token_level_bias_is_below_its_bound(enumerated, name):
    *_, found = enumerated
    bound = group_advantage_bound(GROUP) * np.sqrt(2) * found.gap[name]
    assert 0 < found.mean_norm(name, "token") <= bound


def test_the_gap_is_the_mean_over_tokens_as_infer_draws_them(enumerated):
    *_, tree, found = enumerated
    tv = sum(n.Q * np.abs(n.p_V - n.q_V).sum() for n in tree.nodes)
    assert found.gap["none"] == pytest.approx(tv / sum(n.Q for n in tree.nodes))


def test_what_is_not_followed_is_told():
    train, infer = ModelSteps(toy(1), 1.0), ModelSteps(toy(2), 1.0)
    tree = grow(train, infer, PROMPTS, reward, ends=(END,), width=WIDTH, least=0.05, breadth=2)
    followed = {(n.prompt, *n.tokens) for n in tree.nodes}
    for rest, side in ((tree.rest_p, "p_V"), (tree.rest_q, "q_V")):
        mass = sum(
            (n.P if side == "p_V" else n.Q) * getattr(n, side)[token]
            for n in tree.nodes
            for token in range(VOCABULARY - 1)
            if len(n.tokens) + 1 < WIDTH and (n.prompt, *n.tokens, token) not in followed
        )
        assert 0 < rest == pytest.approx(mass / len(PROMPTS))


def test_a_shared_prompt_changes_no_logprob():
    model, rows, group = toy(3), [(1, 2, END), (0, END), (2, 2, 2)], [0, 1, 1]
    shared_SW = logprobs_of(model, PROMPTS, rows, group, 1.0)
    for row, prompt, shared_W in zip(rows, group, shared_SW, strict=True):
        torch.testing.assert_close(shared_W, logp(model, PROMPTS[prompt], [row])[0])
    logp_11V = logp_after(model, PROMPTS, [(END,)], [1], 2.0).detach()
    assert logp_11V.exp().sum().item() == pytest.approx(1)


def test_an_adapter_travels_merged_into_the_weights_under_their_own_names():
    plain, adapted = toy(4), with_adapter(toy(4).float(), 2, 0).double()
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)

    class Loads:
        def load(self, named):
            plain.load_state_dict(dict(named), strict=False)
            return set()

    before = logp(plain, PROMPTS[0], [(1, 2, END)])
    WeightSync(adapted, Loads())()

    after = logp(plain, PROMPTS[0], [(1, 2, END)])
    torch.testing.assert_close(after, logp(adapted, PROMPTS[0], [(1, 2, END)]))
    assert not torch.allclose(before, after)


TINY = {
    "steps": 2,
    "prompts": 2,
    "answers": 4,
    "evaluated": 4,
    "held_out": 2,
    "evaluate_every": 2,
    "checkpoints": (2,),
    "checkpoint_prompts": 1,
}


def untimed(run):
    steps = {name: column for name, column in run.steps.items() if name != "seconds"}
    return json.dumps(dataclasses.asdict(dataclasses.replace(run, steps=steps, seconds=None)))


@pytest.mark.slow
def test_the_same_seed_gives_the_same_run_but_for_its_times(tmp_path):
    from benchmarks.experiment.training import train

    settings = Settings("one_mlp", "bfloat16", "monitor", 0, **TINY)
    first, again = train(settings), train(settings)

    assert untimed(first) == untimed(again)
    read = read_run(write_run(first, tmp_path))
    assert read.steps["step"] == [0, 1]
    assert len(read.monitor) == 2
    assert read.steps["reward_mean"] == first.steps["reward_mean"]


def test_a_run_that_repeats_another_is_read_with_its_steps(tmp_path):
    steps = {"reward_mean": [0.5]}
    write_run(Run("a", {}, steps=steps), tmp_path)
    path = write_run(Run("b", {}, same_as="a", preflight={"refused": True}), tmp_path)

    run = read_run(path)

    assert (run.steps, run.preflight) == (steps, {"refused": True})


def test_no_number_is_written_as_0(tmp_path):
    path = write_run(Run("a", {}, steps={"k3": [float("nan"), float("inf"), 0.0]}), tmp_path)
    assert read_run(path).steps["k3"] == [None, "inf", 0.0]


def test_the_contract_of_the_experiment_is_sound():
    from click.testing import CliRunner

    from servanda.cli.main import main

    done = CliRunner().invoke(main, ["contract", "lint", str(CONTRACT)])
    assert done.exit_code == 0, done.output


def test_names_of_runs_are_their_own():
    names = [settings.name for settings in full()]
    assert len(names) == len(set(names))


def test_the_rate_of_the_experiment_is_the_one_that_the_pilot_chose():
    rate = pilot.chosen(read_runs(pilot.FOLDER))
    assert Settings("healthy", "bfloat16", "none", 0).learning_rate == rate


def test_no_committed_checkpoint_exceeds_its_bound():
    """In logits, where the norm of a score is known; five digits were kept."""
    for run in read_runs(RESULTS):
        for seen in run.checkpoints:
            for name in WEIGHTINGS:
                assert seen["logit_bias"][name] <= seen["logit_bound"][name] * 1.0002 + 1e-15
