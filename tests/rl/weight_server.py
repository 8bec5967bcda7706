# Servers of one small model that take over weights, in a process of their own, with faults.
#
# They speak what is asked of vLLM 0.32 and of SGLang 0.5.23: scoring and drawing by token ids,
# loading a checkpoint, versions and digests of weights.  One process has several replicas, each
# with its own port and its own weights.  POST /test/begin {"fault": NAME} starts one anew.
#
# python -m tests.rl.weight_server FOLDER FORM REPLICAS

import hashlib
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Lock, Thread

import torch
import transformers
from safetensors.torch import load_file

PATIENCE_S = 60  # how long a request hangs that is meant to
SCALED, FACTOR = "layers.0.mlp.down_proj", 1.5
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


class Served:
    """One replica."""

    def __init__(self, folder):
        self.folder, self.over = folder, Event()
        self.lock = Lock()
        self.begin("none")

    def begin(self, fault):
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.fault, self.version, self.updates = fault, 0, 0
        self.before, self.prefixes, self.name = None, {}, "tiny"
        if fault == "keeps_head":
            head = self.model.lm_head
            head.weight = torch.nn.Parameter(head.weight.detach().clone())

    def load(self, folder):
        """Takes over a checkpoint, as the fault has it."""
        self.updates += 1
        files = sorted(Path(folder).glob("*.safetensors"))
        if self.fault == "half_of_the_shards":
            files = files[: len(files) // 2]
        state = {}
        for file in files:
            state |= load_file(file)
        if self.fault == "version_only":
            self.version += 1
        if self.fault in ("ignores", "version_only"):
            return
        if self.fault == "stops" and self.updates > 4:
            return
        if self.fault == "every_other" and self.updates % 2:
            return
        if self.fault == "late":
            state, self.before = self.before, state
        if self.fault == "scaled":
            state = {n: t * FACTOR if SCALED in n else t for n, t in state.items()}
        if self.fault == "float8":
            state = {
                n: t.to(torch.float8_e4m3fn).to(t.dtype) if t.dim() > 1 else t
                for n, t in state.items()
            }
        if state:
            self.model.load_state_dict(state, strict=False)

    def forget(self):
        if self.fault != "stale_prefixes":
            self.prefixes.clear()

    def logp(self, ids):
        """Logprobs after each token, [T, V]."""
        with self.lock, torch.inference_mode():
            logits = self.model(torch.tensor([ids])).logits[0]
        return logits.double().log_softmax(-1)

    def drawn(self, ids):
        """The distribution of the next token; a known prompt is not computed again."""
        key = tuple(ids)
        if key not in self.prefixes:
            self.prefixes[key] = self.logp(ids)[-1]
        return self.prefixes[key]

    def tensors(self):
        """Tensors as an engine holds them: some of the checkpoint's are one."""
        state, fused = dict(self.model.named_parameters()), {}
        for name, tensor in state.items():
            of = next((f for f, parts in FUSED.items() if any(p in name for p in parts)), None)
            if of is None:
                fused[name] = [tensor]
            else:
                part = next(p for p in FUSED[of] if p in name)
                fused.setdefault(name.replace(part, of), []).append(tensor)
        return {name: torch.cat(parts).detach() for name, parts in fused.items()}

    def digests(self):
        return {
            n: hashlib.sha256(t.numpy().tobytes()).hexdigest() for n, t in self.tensors().items()
        }


def best(logp_V, k):
    values, ids = logp_V.topk(k)
    return list(zip(ids.tolist(), values.tolist(), strict=True))


def picked(logp_V, seed):
    generator = torch.Generator().manual_seed(seed % 2**31)
    return int(torch.multinomial(logp_V.exp(), 1, generator=generator))


class VLLM:
    """What is asked of a vLLM server in its development mode."""

    def get(self, served, path):
        return {
            "/version": {"version": "0.32.0"},
            "/v1/models": {"data": [{"id": "tiny", "max_model_len": 512}]},
            "/weight_info": {"weight_version": str(served.version) if served.version else None},
        }.get(path)

    def post(self, served, path, body):
        if path == "/v1/completions":
            return {"choices": [self.choice(served, body)]}
        if path == "/collective_rpc" and body["method"] == "reload_weights":
            served.load(body["kwargs"]["weights_path"])
            return {"results": [None]}
        if path == "/reset_prefix_cache":
            served.forget()
            return {"success": True}
        if path == "/weight_checker":
            return {"checksums": {f"dp0:pp0:pcp0:tp0:{n}": d for n, d in served.digests().items()}}
        return None

    def choice(self, served, body):
        ids, k = body["prompt"], body.get("prompt_logprobs")
        answer = {"index": 0, "prompt_token_ids": ids, "text": "", "stop_reason": None}
        answer |= {"finish_reason": "length", "prompt_logprobs": None, "logprobs": None}
        if k is not None:
            logp_TV = served.logp(ids)
            rows = [None]
            for token, logp_V in zip(ids[1:], logp_TV, strict=False):
                row = {**dict(best(logp_V, k)), token: float(logp_V[token])}
                rows.append({str(t): {"logprob": v} for t, v in row.items()})
            if served.fault != "no_prompt_logprobs":
                answer["prompt_logprobs"] = rows
            return answer | {"token_ids": [0]}
        logp_V = served.drawn(ids)
        token, k = picked(logp_V, body["seed"]), body["logprobs"]
        listed = {**dict(best(logp_V, k)), token: float(logp_V[token])}
        answer["logprobs"] = {
            "tokens": [f"token_id:{token}"],
            "token_logprobs": [float(logp_V[token])],
            "top_logprobs": [{f"token_id:{t}": v for t, v in listed.items()}],
        }
        return answer | {"token_ids": [token]}


class SGLang:
    """What is asked of a SGLang server."""

    def get(self, served, path):
        if path == "/flush_cache":
            served.prefixes.clear()
            return {"flushed": True}
        version = str(served.version) if served.version else "default"
        info = {"model_path": served.name, "weight_version": version}
        return {
            "/get_model_info": info,
            "/model_info": info,
            "/get_server_info": {"version": "0.5.23", "dtype": "float32"},
            "/v1/models": {"data": [{"id": served.name, "max_model_len": 512}]},
        }.get(path)

    def post(self, served, path, body):
        if path == "/generate":
            return self.generated(served, body)
        if path == "/update_weights_from_disk":
            served.load(body["model_path"])
            served.forget()
            served.name = body["model_path"]  # as SGLang does
            return {"success": True, "message": "Succeeded to update model weights."}
        if path == "/weights_checker":
            sums = {n: d[:16] for n, d in served.digests().items()}
            rank = {"checksums": sums, "per_gpu_checksum": "", "parallelism_info": {}}
            return {"success": True, "message": "", "ranks": [rank]}
        return None

    def generated(self, served, body):
        ids, k = body["input_ids"], body["top_logprobs_num"]
        meta = {"prompt_tokens": len(ids), "finish_reason": {"type": "length", "length": 1}}
        if body["logprob_start_len"] == 0:
            logp_TV = served.logp(ids)
            rows = [(t, logp_V) for t, logp_V in zip(ids[1:], logp_TV, strict=False)]
            own = [[None, ids[0], None], *([float(p[t]), t, None] for t, p in rows)]
            top = [None, *([[v, i, None] for i, v in best(p, k)] for _, p in rows)]
            if served.fault != "no_prompt_logprobs":
                meta |= {"input_token_logprobs": own, "input_top_logprobs": top}
            return {"output_ids": [], "meta_info": meta}
        logp_V = served.drawn(ids)
        token = picked(logp_V, body["sampling_params"]["sampling_seed"])
        meta["output_token_logprobs"] = [[float(logp_V[token]), token, None]]
        meta["output_top_logprobs"] = [[[v, i, None] for i, v in best(logp_V, k)]]
        return {"output_ids": [token], "meta_info": meta}


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_):
        """A client that does not wait for its answer is no error here."""


UPDATES = ("/collective_rpc", "/update_weights_from_disk")
FORMS = {"vllm": VLLM, "sglang": SGLang}


def handler(served, form):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self):
            self.tell(200, form.get(served, self.path))

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])) or "{}")
            if self.path == "/test/begin":
                served.begin(body["fault"])
                return self.tell(200, {})
            if self.path in UPDATES:
                if served.fault == "error_body":
                    wrong = {"success": False, "message": "no such folder"}
                    return self.tell(200, wrong)
                if served.fault in ("status_500", "hangs") and served.updates == 1:
                    served.updates += 1
                    if served.fault == "hangs":
                        served.over.wait(PATIENCE_S)
                    return self.tell(500, {"error": {"message": "out of memory"}})
            return self.tell(200, form.post(served, self.path, body))

        def tell(self, status, value):
            text = json.dumps({"detail": "Not Found"} if value is None else value).encode()
            self.send_response(404 if value is None else status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_):
            pass

    return Handler


def main(folder, form, replicas):
    torch.set_num_threads(1)
    ports = []
    for _ in range(int(replicas)):
        served = Served(folder)
        server = Server(("127.0.0.1", 0), handler(served, FORMS[form]()))
        Thread(target=server.serve_forever, daemon=True).start()
        ports.append(server.server_port)
    print(json.dumps(ports), flush=True)
    sys.stdin.read()  # until whoever started it is gone


if __name__ == "__main__":
    main(*sys.argv[1:])
