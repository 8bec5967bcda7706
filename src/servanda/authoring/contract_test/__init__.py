# Contract tests: a contract run on series, recorded runs and a virtual clock.
