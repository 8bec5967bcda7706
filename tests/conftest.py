# Hypothesis is derandomised: a red test is red for everyone.

from hypothesis import HealthCheck, settings

settings.register_profile(
    "servanda",
    derandomize=True,
    deadline=None,  # machines are shared; time belongs in benchmarks
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("servanda")
