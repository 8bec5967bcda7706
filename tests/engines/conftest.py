# Without torch (make test-all on other interpreters) its engine is left out, and says so.

from importlib.util import find_spec

collect_ignore = []
if find_spec("torch") is None:
    collect_ignore = ["test_transformers.py", "test_quantized.py", "test_vllm.py"]


def pytest_report_header():
    if collect_ignore:
        return "torch is not installed: tests of engine 'transformers' are left out"
    return None
