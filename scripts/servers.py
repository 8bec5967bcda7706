# Real servers, started for tests and for records of what they say, and stopped again.
#
# SERVANDA_VENVS names the folder that they are installed in, as `make test-engines` does it:
# vllm and llamacpp are virtual environments, llamacpp/llama.cpp/bin has llama-server.  Another
# llama-server is named by SERVANDA_LLAMA_SERVER.

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import httpx2

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "models" / "tiny-lm"
VENVS = Path(os.environ.get("SERVANDA_VENVS", ROOT / ".venvs")).absolute()
PATIENCE_S = 900
_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
}


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def vllm_command(port, *more):
    return [
        *(str(VENVS / "vllm" / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(MODEL), "--served-model-name", "tiny-lm", "--dtype", "float32"),
        *(
            "--enforce-eager",
            "--max-num-seqs",
            "8",
            "--max-num-batched-tokens",
            "4096",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        ),
        *more,
    ]


def kernel_command(port, kernel, *more):
    """`servanda tools serve-kernel` of this interpreter."""
    return [
        *(sys.executable, "-m", "servanda", "tools", "serve-kernel", kernel, "--port", str(port)),
        *more,
    ]


def gguf_command(path, kind, model=MODEL):
    """Writes a model as a GGUF: kind is f32, f16 or another that llama.cpp reads."""
    python, script = VENVS / "llamacpp" / "bin" / "python", ROOT / "scripts" / "export_gguf.py"
    return [str(python), str(script), str(model), str(path), "--type", kind]


def local_kernel(engine, folder, place, **more):
    """The keys of a kernel that runs a checkpoint in a local engine; the file that the engine reads
    is written under `place`, unless it is there.

    Raises:
        CalledProcessError: it cannot be written.
    """
    kind = more.get("quantization") or more.get("dtype", "float32")
    name = Path(place) / f"{Path(folder).name}-{kind}"
    if engine == "llamacpp":
        name = name.with_name(f"{name.name}.gguf")
        kind = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}.get(kind, kind)
        command = gguf_command(name, kind, folder)
    elif engine == "onnxruntime":
        name = name / "model.onnx"
        kind = {"float32": "f32"}.get(kind, kind)
        script = ROOT / "scripts" / "export_onnx.py"
        command = [sys.executable, str(script), str(folder), str(name), "--type", kind]
    else:
        return {"engine": engine, "model": str(folder), **more}
    if not name.is_file():
        subprocess.run(command, check=True, capture_output=True, text=True)
    return {"engine": engine, "model": str(name), **more}


def llama_command(port, gguf, *more):
    built = VENVS / "llamacpp" / "llama.cpp" / "bin" / "llama-server"
    found = os.environ.get("SERVANDA_LLAMA_SERVER", built)
    return [
        *(str(found), "-m", str(gguf), "--alias", "tiny-lm", "-t", "1", "-c", "2048", "-np", "4"),
        # a cache in f16 moves logprobs by 2e-4; in f32 the two engines agree to 1e-5
        *("-ctk", "f32", "-ctv", "f32", "-fa", "off", "--no-webui"),
        *("--host", "127.0.0.1", "--port", str(port), *more),
    ]


@contextmanager
def running(command, port, log, extra=None):
    """The url of a server that is up; it is gone afterwards, and so are its children.

    Args:
        extra: variables of its environment.
    """
    folder = Path(command[0]).parent
    libraries = os.pathsep.join([str(folder), os.environ.get("LD_LIBRARY_PATH", "")])
    environment = {**os.environ, **_OFFLINE, "LD_LIBRARY_PATH": libraries}
    if command[0] != sys.executable:  # what is importable here is not for other programs
        environment.pop("PYTHONPATH", None)
    environment |= extra or {}
    with open(log, "wb") as words:
        process = subprocess.Popen(
            command, stdout=words, stderr=words, env=environment, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(process, url, log)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(process, url, log):
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"the server left with {process.returncode}:\n{_tail(log)}")
        try:
            if httpx2.get(f"{url}/health", trust_env=False).status_code == 200:
                return
        except httpx2.TransportError:
            pass
        time.sleep(0.2)
    raise RuntimeError(f"{url} is not up after {PATIENCE_S} s:\n{_tail(log)}")


def _tail(log):
    return Path(log).read_text(errors="replace")[-2000:]
