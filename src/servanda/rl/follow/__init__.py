# Passive follow: whether an engine follows its trainer during a run, without changing a weight.
#
# Both sides score the same fixed tokens after each sync, and the engine's change is regressed on
# the trainer's: slope 1 follows, 0 is never synced.  Every explanation of the engine's scores is a
# claim about the version of the weights that it holds, so two of them are compared by one slope.
#
# score_history: the scores of earlier syncs · rivals: explanations, and their slopes · replica: the
# conclusion about one engine · follow: the object of a run · follow_step: its result · probes: the
# tokens · stale_parts: the trainer with some of its weights as at the start.
