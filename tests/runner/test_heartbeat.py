# A heartbeat over real servers on sockets, which are read for nothing but texts.

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner

from servanda.cli.main import main
from servanda.contract.model import Kernel
from servanda.engines import open_engine
from servanda.engines.table import TableEngine
from servanda.runner.heartbeat.baseline import read_baseline
from servanda.runner.heartbeat.baseline_source import prompt_ids
from servanda.runner.heartbeat.response_rank import BINS, RankScorer
from servanda.theory.sampling import Sampling
from servanda.traces.trace import Batch
from tests import kit
from tests.engines.serving import Gated, Locked, live, table_engine

ROWS = {"": [0.3, 0.28, 0.22, 0.12, 0.08], "a": [0.28, 0.3, 0.22, 0.12, 0.08]}
OTHER = {"": [0.1, 0.1, 0.2, 0.5, 0.1], "a": [0.1, 0.1, 0.2, 0.5, 0.1]}


def tools(*words):
    done = CliRunner().invoke(main, ["tools", "heartbeat", *map(str, words)], prog_name="servanda")
    assert not done.exception or isinstance(done.exception, SystemExit), done.exception
    return done


@pytest.fixture
def world(tmp_path):
    """Prompts, a kernel and its reference."""
    prompts = tmp_path / "prompts.jsonl"
    texts = ["a", "b", "c a", "b b", "d", "a a", "b a", "c"]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    kit.table(tmp_path, "p.json", ROWS)
    kernel = f"table:{tmp_path / 'p.json'}"
    options = ("--prompts", prompts, "--max-new-tokens", 12, "--border-temperature", 1)
    done = tools(kernel, "--record", tmp_path / "r.json", *options)
    assert done.exit_code == 0, done.output
    return tmp_path, options


def address(client):
    return str(client.base_url).rstrip("/")


def served(folder, rows=None, cls=TableEngine, **more):
    folder.mkdir(exist_ok=True)
    return live(table_engine(folder, rows or ROWS, cls=cls), **more)


def beat(folder, url, *words, state="state"):
    return tools(url, "--reference", folder / "r.json", "--state", folder / state, *words)


def state_of(folder, state="state"):
    return json.loads((folder / state / "heartbeat.json").read_text())["state"]


class Cold(TableEngine):
    """Draws at temperature .3 where it is asked for 1."""

    def generate(self, batch, sampling, seed):
        greedy = sampling.top_k == 1
        return super().generate(batch, sampling if greedy else Sampling(temperature=0.3), seed)


class Warm(TableEngine):
    """Draws at temperature 1, whatever is asked for."""

    def generate(self, batch, sampling, seed):
        return super().generate(batch, Sampling(), seed)


class Long(TableEngine):
    """Draws eight tokens, whatever is asked for."""

    def generate(self, batch, sampling, seed):
        batch = type(batch)(batch.sequence_S, batch.prompts, max(8, batch.width))
        return super().generate(batch, sampling, seed)


def test_an_endpoint_that_is_the_reference_gives_no_evidence_and_a_claim_that_names_its_limits(
    world,
):
    folder, _ = world
    with served(folder / "s") as (client, _):
        done = beat(folder, address(client), "--beat", 120)

    assert done.exit_code == 0, done.output
    assert "no evidence of a change so far" in done.output
    assert "first tokens after 4 prompts" in done.output
    assert "logprobs, token ids and other prompts are not examined" in done.output
    assert re.search(
        r"a change of 0\.\d\d in the first token .* would have been detected", done.output
    )


def test_another_distribution_is_found_within_a_day_and_stays_found(world):
    folder, _ = world
    with served(folder / "s", OTHER) as (client, _):
        done = beat(folder, address(client), "--beat", 200)
        asked = state_of(folder)["asked"]
        again = beat(folder, address(client))

        assert state_of(folder)["asked"] == asked
    assert done.exit_code == again.exit_code == 1, done.output
    assert "CHANGED" in done.output and "CHANGED" in again.output
    assert "answers are not those of the reference: weights, precision or prompt" in done.output
    assert asked <= 120


def test_a_colder_sampler_is_found_by_the_ranks_of_answers(world):
    folder, _ = world
    with served(folder / "s", cls=Cold) as (client, _):
        done = beat(folder, address(client), "--beat", 200, "--test", "rank")

    assert done.exit_code == 1, done.output
    assert "by rank" in done.output
    assert "all 8 answers are those of the reference: likely the sampler" in done.output


def test_a_change_is_found_against_an_endpoint_as_it_was(world):
    """Recorded from a server: no kernel, draws and answers to seeds."""
    folder, options = world
    with served(folder / "s") as (client, _):
        made = tools(address(client), "--record", folder / "r.json", *options, "--quiet")
        assert "12 of 12 seeded answers repeat" in made.output
        assert beat(folder, address(client), "--beat", 60).exit_code == 0
        assert "rank" not in state_of(folder)["settings"]["tests"]
        recorded = address(client)
        with served(folder / "t", OTHER) as (other, _):
            changed = beat(folder, address(other), "--beat", 60, state="t")
    assert changed.exit_code == 1, changed.output
    assert recorded != address(other)


def test_a_reference_of_an_endpoint_has_no_rank_test(world):
    folder, options = world
    with served(folder / "s") as (client, _):
        tools(address(client), "--record", folder / "r.json", *options, "--quiet")
        done = beat(folder, address(client), "--test", "rank")

    assert done.exit_code == 2
    assert "--test rank needs a kernel that scores answers" in done.output


def test_no_more_requests_are_sent_than_a_day_has(world):
    folder, _ = world
    with served(folder / "s") as (client, _):
        url = address(client)
        codes = [beat(folder, url, "--budget", 20, "--beat", 16).exit_code for _ in range(3)]
        last = beat(folder, url, "--budget", 20)

    assert codes == [0, 0, 3]
    assert sum(state_of(folder)["spent"].values()) == 20
    assert "nothing was sent: the 20 requests of this UTC day are used up" in last.output


def test_a_request_that_a_crash_cuts_off_is_counted_and_charged(world):
    """Killed while the server works on a request: nothing is refunded."""
    folder, _ = world
    engine = table_engine(folder, ROWS, cls=Gated)
    with live(engine) as (client, _):
        words = ["--reference", folder / "r.json", "--state", folder / "state", "--budget", 10]
        command = [sys.executable, "-m", "servanda", "tools", "heartbeat", address(client), *words]
        begun = subprocess.Popen([*map(str, command)], env=os.environ, cwd=folder)
        assert engine.reached.acquire(timeout=60)
        begun.kill()
        begun.wait()
        engine.open()

        assert sum(state_of(folder)["spent"].values()) == 1
        done = beat(folder, address(client), "--budget", 10, "--beat", 24)
        assert done.exit_code == 0, done.output
        assert sum(state_of(folder)["spent"].values()) == 10


def test_a_lost_answer_of_a_test_is_charged_to_it_at_the_next_beat(world):
    folder, _ = world
    with served(folder / "s") as (client, _):
        beat(folder, address(client), "--beat", 20)
        path = folder / "state" / "heartbeat.json"
        told = json.loads(path.read_text())
        told["state"]["pending"] = "border"
        path.write_text(json.dumps(told))
        beat(folder, address(client))

    after = state_of(folder)
    assert after["records"]["border"]["evidence"]["missing"] == 1
    assert after["pending"] == ""


def test_the_rank_of_an_answer_of_the_reference_itself_is_uniform(world):
    """By chi-square over bins, at a threshold that one of 10,000 such tests exceeds."""
    folder, _ = world
    kernel = Kernel(engine="table", model=str(folder / "p.json"))
    engine, baseline = open_engine(kernel), read_baseline(folder / "r.json")
    ids = prompt_ids(engine, baseline.prompts, False)
    scorer = RankScorer(engine, kernel, baseline, ids)
    runs = 400
    rows = [run % len(ids) for run in range(runs)]
    batch = Batch(tuple(range(runs)), tuple(ids[row] for row in rows), baseline.width)
    drawn = engine.generate(batch, Sampling(), 99).continuations
    eos = engine.describe().eos
    texts = engine.decode([[t for t in tokens if t not in eos] for tokens in drawn])

    found = np.array(
        [
            scorer.bins(row, text, run, 1)
            for run, (row, text) in enumerate(zip(rows, texts, strict=True))
        ]
    )

    for column in found.T:
        count = np.bincount(column, minlength=BINS)
        chi_square = ((count - runs / BINS) ** 2 / (runs / BINS)).sum()
        assert chi_square < 29.9  # 7 degrees of freedom


class Chatty(TableEngine):
    """A template that is the message itself."""

    def render(self, messages, tools=None):
        return messages[-1]["content"]


def test_an_endpoint_with_chats_alone_is_watched(world):
    folder, options = world
    with served(folder / "s", cls=Chatty) as (client, _):
        made = tools(address(client), "--record", folder / "r.json", *options, "--chat", "--quiet")
        done = beat(folder, address(client), "--beat", 40)
    kernel = tools(f"table:{folder / 'p.json'}", "--record", folder / "x.json", *options, "--chat")

    assert made.exit_code == 0, made.output
    assert done.exit_code == 0, done.output
    assert kernel.exit_code == 4 and "render" in kernel.output


# what goes wrong first


def test_a_server_that_is_down_is_an_error_and_no_evidence(world):
    folder, _ = world
    with served(folder / "s") as (client, _):
        url = address(client)
    done = beat(folder, f"{url},served=toy")

    assert done.exit_code == 4
    assert "cannot be reached" in done.output and "start the server" in done.output
    records = state_of(folder)["records"].values()
    assert [record["evidence"]["missing"] for record in records] == [0, 0, 0]


def test_a_key_that_is_missing_is_named(world, monkeypatch):
    folder, _ = world
    with served(folder / "s", locked=lambda app: Locked(app, "right")) as (client, _):
        unnamed = beat(folder, f"{address(client)},served=toy")
        unset = beat(folder, f"{address(client)},served=toy,key_env=HEARTBEAT_KEY")
        monkeypatch.setenv("HEARTBEAT_KEY", "right")
        right = beat(folder, f"{address(client)},served=toy,key_env=HEARTBEAT_KEY")

    assert unnamed.exit_code == unset.exit_code == 4
    assert "key_env" in unnamed.output
    assert "HEARTBEAT_KEY, and this variable is not set" in unset.output
    assert right.exit_code == 0, right.output
    assert "right" not in (folder / "state" / "heartbeat.json").read_text()


def test_a_reference_of_another_model_is_refused(world):
    folder, options = world
    with served(folder / "s") as (client, _):
        tools(address(client), "--record", folder / "r.json", *options, "--quiet")
        done = beat(folder, f"{address(client)},served=another")

    assert done.exit_code == 4
    assert "is a reference of model 'toy'" in done.output and "served=toy" in done.output


def test_a_budget_of_nothing_is_refused(world):
    folder, _ = world
    done = beat(folder, "http://127.0.0.1:1", "--budget", 0)

    assert done.exit_code == 2
    assert "--budget 0 sends nothing" in done.output


@pytest.mark.parametrize(
    ("cls", "says"),
    [(Warm, "ignores temperature: at 0"), (Long, "ignores max_tokens: it answered")],
)
def test_an_endpoint_that_ignores_its_sampling_is_refused(world, cls, says):
    folder, _ = world
    with served(folder / "s", cls=cls) as (client, _):
        done = beat(folder, address(client), "--beat", 30)

    assert done.exit_code == 4, done.output
    assert says in done.output


def test_a_state_of_another_endpoint_or_reference_is_refused(world):
    folder, options = world
    with served(folder / "s") as (one, _), served(folder / "t") as (two, _):
        assert beat(folder, address(one)).exit_code == 0
        endpoint = beat(folder, address(two))
        alpha = beat(folder, address(one), "--alpha", 0.05)
        tools(f"table:{folder / 'p.json'}", "--record", folder / "r.json", *options[:2])
        reference = beat(folder, address(one))

    assert endpoint.exit_code == alpha.exit_code == reference.exit_code == 4
    assert "belongs to another heartbeat: its url is" in endpoint.output
    assert "its alpha is 0.01, and this one's is 0.05" in alpha.output
    assert "its reference is" in reference.output


def test_files_that_are_none_are_refused(world):
    folder, _ = world
    path = folder / "r.json"
    told = json.loads(path.read_text())
    told["baseline"]["temperature"] = 0.5
    path.write_text(json.dumps(told))
    changed = beat(folder, "http://127.0.0.1:1")
    path.write_text("{}")
    other = beat(folder, "http://127.0.0.1:1")
    path.unlink()
    missing = beat(folder, "http://127.0.0.1:1")
    kernel = tools(f"table:{folder / 'p.json'}", "--reference", folder / "r.json")
    neither = tools("http://127.0.0.1:1")

    assert "is not what its digest says" in changed.output
    assert "is no reference of a heartbeat" in other.output
    assert "there is no reference" in missing.output
    assert "a heartbeat asks a server" in kernel.output
    assert neither.exit_code == 2 and "--record FILE" in neither.output


def test_prompts_with_one_certain_text_are_refused(world):
    folder, options = world
    kit.table(folder, "sure.json", {"": [1.0, 0, 0, 0, 0]})
    done = tools(f"table:{folder / 'sure.json'}", "--record", folder / "x.json", *options)

    assert done.exit_code == 4
    assert "after every prompt one first text is certain" in done.output


def test_a_beat_is_printed_as_json(world):
    folder, _ = world
    with served(folder / "s") as (client, _):
        done = beat(folder, address(client), "--format", "json", "--beat", 40)
    told = json.loads(done.stdout)

    assert told["changed"] is None and told["exit_code"] == 0
    assert told["today"] == told["sent"] == told["asked"] == 40
    assert told["tests"]["border"]["answers"] > 0
