# The preflight test of a trainer whose parameters are sharded over processes.
#
# shards: what this process has of a tensor · process_group: the calls of rank 0 on all ranks ·
# other_ranks: what the others carry out.
