# The sync drill: does what a trainer updates reach the kernel that draws its rollouts?
#
# At the first step both kernels have the same weights, whatever the sync does, and a sync that
# leaves a layer out stays below the noise of a bfloat16 engine for hundreds of steps.  So the
# drill changes the trainer's weights itself, syncs, and scores both sides: all of them at once,
# then one group at a time.  It reads nothing of the engine but logprobs, so what the engine does
# to weights on loading (fusing, sharding, quantising) is none of its business.
#
# trainee: the trainer and its engine · weight_groups: weights by name · perturbation,
# response_slope: how far one side follows the other · noise: what is put into weights ·
# weight_snapshot: how they come back · drill: the order of it all · diagnosis: what is wrong ·
# result: what it measures · report: what comes of it.
