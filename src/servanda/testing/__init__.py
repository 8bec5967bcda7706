# What an engine has to do, as a test that any engine can be put to: built-ins, servers, plug-ins.
#
#     from servanda.testing import check_engine
#
#     def test_my_engine():
#         check_engine(lambda: MyEngine(kernel))
#
# A law is one decorated function of a Case, in one of these modules.

from servanda.testing.base import LAWS
from servanda.testing.conformance import Finding, Report, check_engine, examine_engine

__all__ = ["LAWS", "Finding", "Report", "check_engine", "examine_engine"]
