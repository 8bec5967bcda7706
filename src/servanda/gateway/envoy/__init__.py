# Envoy: its external authorization and its external processor, answered with the leader's routes.
