# Drafts of speculative decoding in a trace: a server counts them by itself, and gives one number
# for all sequences of a batch, in `Trace.about`.

COUNTED = "drafts"  # in about: {"drafts", "proposed", "accepted", "by_depth", "longest"} as JSON
