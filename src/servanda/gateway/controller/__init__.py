# The controller scores what gateways sampled, keeps the evidence, and makes the routes.
