# The controller scores the requests that gateways sampled, keeps the evidence and publishes routes.
