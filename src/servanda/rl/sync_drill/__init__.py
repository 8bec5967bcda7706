# The preflight sync test (drill): whether a trainer's updates reach the kernel that samples its
# rollouts.
#
# At the first step both kernels have the same weights, whatever the sync does, and a sync that
# omits a layer stays below the noise of a bfloat16 engine for hundreds of steps.  So the test
# changes the trainer's weights, syncs, and scores both sides: all weights at once, then one group
# at a time.  It reads only logprobs of the engine, so it does not depend on the engine's processing
# of weights (fusing, sharding, quantising).
#
# trainee: the trainer and its engine · weight_groups: weights by name · perturbation,
# response_slope: the response of one side to the other · noise: perturbations of weights ·
# weight_snapshot: restoring weights · drill: the order of the test · held_weights: what an engine
# holds instead · diagnosis: causes · result: measurements · report: output · parallel: shards and
# their processes · stream, stream_drill: a sync as a stream of names and tensors.
