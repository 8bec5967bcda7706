# Without their libraries (make test-all on other interpreters) engines are left out, and say so.

from importlib.util import find_spec

NEEDS = {
    "test_transformers.py": {"torch"},
    "test_quantized.py": {"torch"},
    "test_routes.py": {"torch"},
    "test_rank_processes.py": {"torch"},
    "test_transformers_parts.py": {"torch"},
    "test_stored.py": {"torch"},
    "test_tensor_sums.py": {"torch"},
    "interpreted.py": {"torch"},
    "test_vllm.py": {"torch"},
    "test_time.py": {"torch"},
    "test_weight_sync.py": {"torch"},
    "test_server.py": {"starlette", "uvicorn"},
    "test_server_fails.py": {"starlette", "uvicorn"},
    "test_server_streams_a_model.py": {"torch", "starlette", "uvicorn"},
    "test_onnxruntime.py": {"torch", "onnx", "onnxruntime", "onnxscript"},
}
MISSING = {name: sorted(n for n in needs if find_spec(n) is None) for name, needs in NEEDS.items()}
collect_ignore = [name for name, missing in MISSING.items() if missing]


def pytest_report_header():
    return [f"{name} is left out: no {', '.join(MISSING[name])}" for name in collect_ignore]
