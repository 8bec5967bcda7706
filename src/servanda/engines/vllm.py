# Engine `vllm`: vLLM offline, in an environment of its own (kernels.*.python).
#
# One instance reports one kind of logprobs.  Here it is "processed": after temperature and
# filters, so that a record says with what probability a token was really drawn.  Raw ones,
# which scores and logits are made of, come from prompt_logprobs, since a prompt passes no
# sampler, and from a tap before the sampler.  The tap also forces given tokens, by masking all
# others; where vLLM runs its second model runner, trace_decode_token_ids does both.
# Axes: S sequences, T tokens of one sequence, V vocabulary, K best tokens.

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from servanda.contract.identity import Description
from servanda.contract.model import Kernel, Path
from servanda.engines import checkpoint, folder, vllm_launch
from servanda.engines.base import CHUNK_ELEMENTS, ENGINES, about_of, refuse_misfits
from servanda.engines.checkpoint import adapter_digests, adapter_folder, adapter_tensors
from servanda.engines.vllm_launch import KEY, Reported, Rows, SequenceRecord, Tap, trace_of
from servanda.errors import MeasurementError
from servanda.theory.sampling import Floats, Sampling, columns_of, processed_logprobs, seed_of
from servanda.traces.trace import Batch, Timing, Trace

BEST = 8  # top-k tokens that are recorded of a draw
TOP = 20  # and that `top` gives
TEMPERATURES = (0.01, 2.0)  # vLLM raises what is below, and refuses what is above
PLAIN = Sampling(temperature=1.0, top_k=None, top_p=1.0, min_p=0.0)

_ENDED = ("stop", "length")

Request = tuple[Sequence[int], Any]  # prompt ids, SamplingParams


@ENGINES.register("vllm")
class VllmEngine(checkpoint.Tokenized):
    """Draws with vLLM's own sampler; scores by prompt_logprobs or by forced decoding.

    Requests are handed over at once; kernel.batch_size of them run together (max_num_seqs),
    and others join as they end.
    """

    keys = ("adapter",)
    kv_caches, options = vllm_launch.KV_CACHES, vllm_launch.OPTIONS

    def __init__(self, kernel: Kernel) -> None:
        vllm_launch.refuse_options(kernel)
        place = folder.checkpoint_folder(kernel.model)
        config_json = folder.read_json(place / "config.json")
        tokenizer_json = folder.read_json(place / "tokenizer.json")
        self.kernel = kernel
        self._vllm = vllm_launch.imported()
        config = checkpoint.read_config(place)
        self._tokenizer = checkpoint.read_tokenizer(place)
        text_config = config.get_text_config()
        context = getattr(text_config, "max_position_embeddings", None)
        # of a checkpoint that is stored quantised, the tensors are not those that train has
        tensors = {} if kernel.weights_from else vllm_launch.digests(place, config)
        if kernel.adapter is not None and tensors:
            tensors |= adapter_digests(adapter_tensors(adapter_folder(kernel.adapter)))
        self._adapter = vllm_launch.lora_request(kernel)
        self._taps = vllm_launch.taps_here(kernel)
        self._llm: Any = vllm_launch.start(self._vllm, kernel, place, context, self._taps)
        self._description = Description(
            fingerprint=vllm_launch.fingerprint(
                self._vllm, self._llm, kernel, config.model_type, config_json
            ),
            tensors=tensors,
            tokens=folder.token_digest(self._tokenizer.get_vocab(), tokenizer_json),
            vocab_size=text_config.vocab_size,
            eos=folder.end_tokens(place, text_config.to_dict()),
            context=context,
            timed=True,
            capture="float32",
            scores=("prefill",) if vllm_launch.speculates(kernel) else ("prefill", "decode"),
            weights_from=kernel.weights_from or "",
            config=folder.config_values(config_json),
        )
        self.clock: Callable[[], float] = time.perf_counter

    def describe(self) -> Description:
        return self._description

    def generate(self, batch: Batch, sampling: Sampling, seed: int) -> Trace:
        """As `Engine.generate`, but with vLLM's own draws: see `seed_of`.

        "logp" and the best tokens are what vLLM reports of its sampler.  The other columns
        follow from the declared transform and from the raw logprobs that the sampler got: one
        that filters otherwise does not hide behind its own report.
        """
        k = min(BEST, self._description.vocab_size)

        def read(row: int, output: Any) -> SequenceRecord:
            tokens = list(output.outputs[0].token_ids)
            reported = Reported.of(output.outputs[0].logprobs)
            columns = reported.columns(k)
            if self._taps is not None:
                logp_TV = _processed(self._taps[str(row)].rows(len(tokens)), sampling)
                columns |= columns_of(logp_TV, np.array(tokens))
            return tokens, columns | {"logp": reported.logp_TK[:, 0]}

        about = about_of(batch, self.kernel, "decode", sampling)
        drafts = vllm_launch.speculates(self.kernel)
        before = vllm_launch.draft_counters(self._llm) if drafts else {}
        parts: list[SequenceRecord | None] = []
        for chunk in self._chunks(batch):
            parts += self._served(self._draws(chunk, sampling, seed, logprobs=k), read)
        if drafts:
            about |= vllm_launch.counted(before, vllm_launch.draft_counters(self._llm))
        return trace_of(parts, batch, about)

    def score(self, batch: Batch, sampling: Sampling, path: Path) -> Trace:
        """As `Engine.score`; a transform is applied here, to whole rows of raw logprobs."""
        parts: list[SequenceRecord | None] = []
        for given, reported in self._given(batch, path, 1 if sampling == PLAIN else None):
            if reported is None:
                parts.append(None)
            elif isinstance(reported, Reported):
                parts.append((given, reported.columns(0)))
            else:
                logp_TV = _processed(reported, sampling)
                parts.append((given, columns_of(logp_TV, np.array(given, dtype=np.int64))))
        return trace_of(parts, batch, about_of(batch, self.kernel, path, sampling))

    def logits(self, batch: Batch, path: Path) -> Iterator[NDArray[np.float32]]:
        """As `Engine.logits`, each row less its log-sum-exp: raw logprobs.

        vLLM gives those of a prompt as one Python object an entry.  The rows of decoding are
        tapped as arrays, and cost nothing beside it.
        """
        size = max(1, CHUNK_ELEMENTS // self._description.vocab_size)
        for chunk in batch.chunks(self.kernel.batch_size):
            for sequence, (given, reported) in zip(
                chunk.sequence_S, self._given(chunk, path, None), strict=True
            ):
                if reported is None:
                    raise MeasurementError(
                        f"vLLM gave up sequence {sequence} of those whose logits it was asked for",
                        hint="finished rounds are kept: run the same command again to continue",
                    )
                assert not isinstance(reported, Reported)
                for start in range(0, len(given), size):
                    yield reported[start : start + size]

    def top(self, batch: Batch, path: Path) -> Trace:
        k = min(TOP, self._description.vocab_size)
        parts: list[SequenceRecord | None] = []
        for given, reported in self._given(batch, path, k):
            assert reported is None or isinstance(reported, Reported)
            parts.append(None if reported is None else (given, reported.columns(k)))
        return trace_of(parts, batch, about_of(batch, self.kernel, path, PLAIN))

    def time(self, batch: Batch, sampling: Sampling, seed: int, record: bool) -> Timing:
        """As `Engine.time`: a token is there when the step that made it has returned."""
        k = min(BEST, self._description.vocab_size) if record else None
        at_ST: list[list[float]] = []
        begun = self.clock()
        for chunk in self._chunks(batch):
            base = len(at_ST)
            at_ST += [[] for _ in chunk.sequence_S]
            for outputs in self._steps(self._draws(chunk, sampling, seed, logprobs=k, taps=False)):
                now = self.clock()
                for output in outputs:
                    new = len(output.outputs[0].token_ids)
                    at_ST[base + int(output.request_id)] += [now] * new
        if not all(at_ST):
            raise MeasurementError(
                f"vLLM gave up {at_ST.count([])} of {len(batch)} requests before their first token",
                hint="lower the load, or give vLLM more memory (VLLM_CPU_KVCACHE_SPACE)",
            )
        return Timing.of_requests(begun, at_ST)

    def close(self) -> None:
        self._llm = None

    # asking

    def _chunks(self, batch: Batch) -> list[Batch]:
        """What is handed over at once: all, but where a batch says how many run together."""
        refuse_misfits(batch, self._description)
        together, size = batch.together, self.kernel.batch_size
        if together is None:
            return [batch]
        if together > size:
            raise MeasurementError(
                f"{together} sequences are to run together, and this vLLM was started for {size}",
                hint=f"let the kernel have batch_size: {together}",
            )
        return batch.chunks(together)

    def _params(self, row: int, tap: Tap | None, **options: Any) -> Any:
        """SamplingParams: raw and unfiltered, and nothing left to a default that may change."""
        if tap is not None and self._taps is not None:
            self._taps[str(row)] = tap
            options["extra_args"] = {KEY: str(row)}
        plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
        # ends are stop_token_ids, where there are any; ids go in and ids come out
        form = {"ignore_eos": True, "detokenize": False, "flat_logprobs": True}
        return self._vllm.SamplingParams(**plain | form | options)

    def _draws(
        self,
        chunk: Batch,
        sampling: Sampling,
        seed: int,
        *,
        logprobs: int | None,
        taps: bool = True,
    ) -> list[Request]:
        low, high = TEMPERATURES
        if not low <= sampling.temperature <= high:
            raise MeasurementError(
                f"vLLM draws at temperatures from {low} to {high}, and this one is "
                f"{sampling.temperature}",
                hint="choose another workload.sampling.temperature, or another engine",
            )
        if sampling.min_p and vllm_launch.speculates(self.kernel):
            raise MeasurementError(
                "vLLM ignores min_p beside speculation",
                hint="remove workload.sampling.min_p, or options.speculative_config",
            )
        kinds: Any = importlib.import_module("vllm.sampling_params").RequestOutputKind
        return [
            (
                prompt,
                self._params(
                    row,
                    Tap() if taps else None,
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    top_k=sampling.top_k or 0,
                    min_p=sampling.min_p,
                    seed=seed_of(seed, "vllm", sequence),
                    max_tokens=chunk.width,
                    stop_token_ids=list(self._description.eos),
                    logprobs=logprobs,
                    output_kind=kinds.FINAL_ONLY if taps else kinds.DELTA,
                ),
            )
            for row, (sequence, prompt) in enumerate(
                zip(chunk.sequence_S, chunk.prompts, strict=True)
            )
        ]

    def _ask(self, row: int, part: Batch, path: Path, k: int | None) -> Request:
        """A request whose answer says something of every given token."""
        prompt, given = part.prompts[row], part.continuations[row]
        options: dict[str, Any] = {} if self._taps is not None else {"logprobs": -1}
        if path == "prefill":
            # the last token is not fed: a text may fill the context, and vLLM always draws one
            options |= {"max_tokens": 1, "prompt_logprobs": -1 if k is None else k}
            return (*prompt, *given[:-1]), self._params(row, Tap(), **options)
        if self._taps is None:
            options["trace_decode_token_ids"] = list(given)
        return prompt, self._params(row, Tap(given), max_tokens=len(given), **options)

    # answering

    def _steps(self, requests: Sequence[Request]) -> Iterator[list[Any]]:
        """Serves requests, named by their row; yields what each step of the engine gave."""
        engine = self._llm.llm_engine
        prompts = [{"prompt_token_ids": list(ids)} for ids, _ in requests]
        try:
            for row, prompt in enumerate(engine.renderer.render_cmpl(prompts) if prompts else ()):
                engine.add_request(str(row), prompt, requests[row][1], lora_request=self._adapter)
            while engine.has_unfinished_requests():
                yield engine.step()
        finally:
            if engine.has_unfinished_requests():  # after an error: the next batch runs alone
                engine.abort_request([str(row) for row in range(len(requests))])
            if self._taps is not None:
                self._taps.clear()

    def _served(self, requests: Sequence[Request], read: Callable[[int, Any], Any]) -> list[Any]:
        """What `read` makes of each finished request, in order; None of one that was given up."""
        results: list[Any] = [None] * len(requests)
        for outputs in self._steps(requests):
            for output in outputs:
                if output.finished and output.outputs[0].finish_reason in _ENDED:
                    row = int(output.request_id)
                    results[row] = read(row, output)
        return results

    def _given(
        self, batch: Batch, path: Path, k: int | None
    ) -> Iterator[tuple[tuple[int, ...], Reported | Rows | None]]:
        """Each continuation with raw logprobs: the k best, or where k is None whole rows [T, V].

        None where the request was given up.
        """
        nothing = np.zeros((0, self._description.vocab_size), dtype=np.float32)
        for chunk in self._chunks(batch):
            rows = [row for row, given in enumerate(chunk.continuations) if given]
            part = chunk.take(rows)

            def read(row: int, output: Any, part: Batch = part) -> Reported | Rows:
                return self._answer(row, output, part, path, k)

            results = self._served([self._ask(r, part, path, k) for r in range(len(part))], read)
            reported = dict(zip(rows, results, strict=True))
            empty = nothing if k is None else Reported.best(nothing, (), k)
            for row, given in enumerate(chunk.continuations):
                yield given, reported.get(row, empty)

    def _answer(
        self, row: int, output: Any, part: Batch, path: Path, k: int | None
    ) -> Reported | Rows:
        given, done = part.continuations[row], output.outputs[0]
        if path == "decode" and tuple(done.token_ids) != given:
            raise MeasurementError(
                f"vLLM was given {len(given)} tokens of sequence {part.sequence_S[row]} to decode, "
                "and decoded others",
                hint="its model runner cannot replay tokens: let this side score by prefill",
            )
        vocab_size = self._description.vocab_size
        if self._taps is not None:
            tail_TV = self._taps[str(row)].rows(len(done.token_ids))
        else:
            tail_TV = Reported.of(done.logprobs).rows(vocab_size)
        head = None
        if path == "prefill" and len(given) > 1:
            head = Reported.of(output.prompt_logprobs).last(len(given) - 1)
        if k is None:
            return tail_TV if head is None else np.concatenate([head.rows(vocab_size), tail_TV])
        tail = Reported.best(tail_TV, given[-len(tail_TV) :], k)
        return tail if head is None else head.then(tail)


def _processed(logp_TV: Rows, sampling: Sampling) -> Floats:
    """After the transform; where there is none they stay as vLLM has them, to the bit."""
    wide_TV = logp_TV.astype(np.float64)
    return wide_TV if sampling == PLAIN else processed_logprobs(wide_TV, sampling)
