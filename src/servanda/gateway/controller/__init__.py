# The leader: scores what gateways sampled, keeps the evidence, and makes the routes they follow.
