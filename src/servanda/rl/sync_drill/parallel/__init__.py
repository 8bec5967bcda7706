# What each process does in a preflight test: one for a whole module, several for shards.
#
# local_weights: the weights that this process has · shards: their places in whole tensors ·
# weight_journal: their copy on disk · process_group: the calls of rank 0 on all ranks ·
# other_ranks: what the others carry out.
