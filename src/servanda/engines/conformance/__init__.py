# What an engine has to do, as a test that any engine can be put to: built-ins, servers, plug-ins.
#
#     from servanda.engines.conformance import check_engine
#
#     def test_my_engine():
#         check_engine(lambda: MyEngine(kernel))
#
# A law is one decorated function of a Case, in one of these modules.

from servanda.engines.conformance.base import LAWS
from servanda.engines.conformance.check import Finding, Report, check_engine, examine_engine

__all__ = ["LAWS", "Finding", "Report", "check_engine", "examine_engine"]
