# Without torch (make test-all on other interpreters) the faults of real engines are left out.

from importlib.util import find_spec

collect_ignore = [] if find_spec("torch") else ["test_real_engines.py", "test_sync_faults.py"]
