# The engine of a trainer of TRL: rollouts of our own, vLLM's scores, and the drill of a script.

import copy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from servanda.errors import ContractError, MeasurementError
from servanda.rl.trl import drilled, rollouts, trainee
from tests.rl.monitor.recorded import Call, Trainer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

MODEL = str(Path(__file__).parents[2] / "models" / "tiny-lm")
PROMPTS = [[5, 6, 7], [5, 6, 7], [8, 9]]


@pytest.fixture(scope="module")
def module():
    return transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


@pytest.fixture
def trainer(module):
    """Stands in for GRPOTrainer, with a model of its own."""
    return SimpleNamespace(
        model=module,
        accelerator=SimpleNamespace(process_index=0, unwrap_model=lambda model: model),
        state=SimpleNamespace(global_step=0),
        args=SimpleNamespace(seed=7),
        max_completion_length=6,
        repetition_penalty=1.0,
        temperature=0.8,
        top_p=1.0,
        top_k=0,
        min_p=None,
        _tokenize_prompts=lambda prompts: (prompts, None, {}),
    )


@pytest.fixture(scope="module")
def draws():
    return rollouts(f"transformers:{MODEL}@float32")


def scored(module, ids, temperature):
    """Logprobs of the tokens of a row but the first, by the module itself."""
    with torch.no_grad():
        logits_TV = module(torch.tensor([ids])).logits[0, :-1].double() / temperature
    return logits_TV.log_softmax(-1).numpy()[np.arange(len(ids) - 1), ids[1:]]


def test_tokens_come_with_the_logprobs_they_were_drawn_with(draws, trainer, module):
    found = draws(PROMPTS, trainer)
    assert found["prompt_ids"] == PROMPTS
    for prompt, ids, logps in zip(PROMPTS, found["completion_ids"], found["logprobs"], strict=True):
        wanted = scored(module, [*prompt, *ids], 0.8)[len(prompt) - 1 :]
        np.testing.assert_allclose(logps, wanted, atol=1e-4)


def test_completions_of_one_prompt_differ_and_every_call_draws_anew(draws, trainer):
    first, again = (draws(PROMPTS, trainer)["completion_ids"] for _ in range(2))
    assert first[0] != first[1] and first != again


def test_weights_travel_when_they_have_changed_and_not_else(trainer):
    calls = []
    made = rollouts(f"transformers:{MODEL}@float32", sync=lambda: calls.append(1))
    for step in (0, 0, 1):
        trainer.state.global_step = step
        made(PROMPTS, trainer)
    assert len(calls) == 2


def test_another_trainer_with_the_same_rollouts_is_synced_at_its_first_step(trainer, module):
    other = SimpleNamespace(**{**vars(trainer), "model": copy.deepcopy(module)})
    with torch.no_grad():
        other.model.get_input_embeddings().weight.mul_(0.5)
    made = rollouts(f"transformers:{MODEL}@float32")
    for one in (trainer, other, trainer):
        found = made(PROMPTS[:1], one)
        ids, logps = found["completion_ids"][0], found["logprobs"][0]
        wanted = scored(one.model, [*PROMPTS[0], *ids], 0.8)[len(PROMPTS[0]) - 1 :]
        np.testing.assert_allclose(logps, wanted, atol=1e-4)


def test_what_cannot_be_drawn_is_refused(draws, trainer):
    trainer.repetition_penalty = 1.1
    with pytest.raises(MeasurementError, match=r"repetition_penalty is 1\.1, which rollouts"):
        draws(PROMPTS, trainer)
    trainer.repetition_penalty = 1.0
    trainer._tokenize_prompts = lambda prompts: (prompts, ["an image"], {})
    with pytest.raises(MeasurementError, match="the prompts have images"):
        draws(PROMPTS, trainer)


def test_the_drill_scores_by_the_engine(draws, trainer, module):
    trainer.rollout_func = draws
    found = trainee(trainer)
    rows = [[5, 6, 7, 8], [9, 10]]
    assert found.module is module
    for row, logp_T in zip(rows, found.score(rows), strict=True):
        np.testing.assert_allclose(logp_T, scored(module, row, 1.0), atol=1e-4)


def vllm_trainer(vllm):
    made = Trainer(Call("vllm"))
    made.vllm_generation = vllm
    made.accelerator.unwrap_model = lambda model: model
    return made


def test_vllm_in_this_process_is_asked_for_the_prompts_own_logprobs(monkeypatch):
    asked = []

    def generate(prompts, sampling_params, use_tqdm):
        asked.append((prompts, sampling_params))
        rows = [prompt["prompt_token_ids"] for prompt in prompts]
        at = lambda row: [None, *({t: SimpleNamespace(logprob=-t / 10)} for t in row[1:])]  # noqa: E731
        return [SimpleNamespace(prompt_logprobs=at(row)) for row in rows]

    module = ModuleType("vllm")
    module.SamplingParams = dict
    monkeypatch.setitem(sys.modules, "vllm", module)
    sync = object()
    vllm = SimpleNamespace(
        mode="colocate", llm=SimpleNamespace(generate=generate), sync_weights=sync
    )
    found = trainee(vllm_trainer(vllm))
    assert found.sync is sync
    assert [part.tolist() for part in found.score([[1, 2, 3], [4, 5]])] == [[-0.2, -0.3], [-0.5]]
    ((_, params),) = asked
    assert params["prompt_logprobs"] == 0 and params["temperature"] == 1.0


def test_vllm_behind_a_socket_is_asked_by_trls_client():
    def get_sequence_logprobs(sequences, prompt_lengths, top_logprobs):
        assert prompt_lengths == [1] * len(sequences) and top_logprobs == 0
        return {"actual_logprobs": [[[-t / 10] for t in row[1:]] for row in sequences]}

    client = SimpleNamespace(get_sequence_logprobs=get_sequence_logprobs)
    vllm = SimpleNamespace(mode="server", vllm_client=client, sync_weights=print)
    found = trainee(vllm_trainer(vllm))
    assert [part.tolist() for part in found.score([[1, 2, 3]])] == [[-0.2, -0.3]]


# a script instead of a trainer


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Writes a training script; `trl` is a stand-in, and a drill says whom it was given."""
    trl = ModuleType("trl")
    trl.GRPOTrainer = type("GRPOTrainer", (), {})
    monkeypatch.setitem(sys.modules, "trl", trl)
    monkeypatch.setattr("servanda.rl.trl_engine.trainee", lambda trainer: trainer)
    monkeypatch.setattr("servanda.rl.sync_drill.drill.preflight", lambda trainer, **_: trainer)

    def write(text):
        path = tmp_path / "train.py"
        path.write_text(text)
        return path

    return write


def test_a_script_runs_as_far_as_train_and_no_further(script, tmp_path):
    path = script(
        "import sys, pathlib\n"
        "from trl import GRPOTrainer\n"
        "trainer = GRPOTrainer()\n"
        "trainer.argv = sys.argv\n"
        "if __name__ == '__main__':\n"
        "    try:\n"
        "        trainer.train(resume_from_checkpoint=True)\n"
        "    except Exception:\n"
        "        pass\n"
        "    pathlib.Path(sys.argv[1]).write_text('trained')\n"
    )
    found = drilled(path, [str(tmp_path / "after")])
    assert found.argv == [str(path), str(tmp_path / "after")]
    assert not (tmp_path / "after").exists()
    assert not hasattr(sys.modules["trl"].GRPOTrainer, "train")


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        (
            "import trl",
            ContractError,
            "never calls GRPOTrainer.train\n  hint: pass the training script",
        ),
        ("raise SystemExit(0)", ContractError, "never calls GRPOTrainer.train"),
        ("raise SystemExit(3)", MeasurementError, "exited with 3 before it called train"),
        ("1 / 0", MeasurementError, "failed before it called train: ZeroDivisionError: division"),
    ],
)
def test_a_script_that_does_not_come_to_train_is_an_error(script, text, error, said):
    with pytest.raises(error) as caught:
        drilled(script(text))
    assert said in str(caught.value)


def test_a_script_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(ContractError, match=r"there is no file .*train\.py"):
        drilled(tmp_path / "train.py")


def test_without_trl_there_is_nothing_to_replace(script, monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(ContractError, match="TRL is not installed here"):
        drilled(script("import trl"))
