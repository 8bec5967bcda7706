# Without torch (make test-all on other interpreters) its engine is left out, and says so; the
# same for the server without its libraries.

from importlib.util import find_spec

collect_ignore = []
if find_spec("torch") is None:
    collect_ignore = ["test_transformers.py", "test_quantized.py", "test_server_streams_a_model.py"]
if find_spec("starlette") is None or find_spec("uvicorn") is None:
    collect_ignore += ["test_server.py", "test_server_fails.py", "test_server_streams_a_model.py"]


def pytest_report_header():
    if collect_ignore:
        return f"a library is not installed, left out are: {', '.join(sorted({*collect_ignore}))}"
    return None
