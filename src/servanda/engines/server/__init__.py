# Any engine behind the OpenAI API, in vLLM's dialect: the server of demos and tests.
#
#   wire       what a request asks, and what is refused
#   running    asked for together, run together: jobs to engine verbs
#   batching   the queue, and the one thread that owns the engine
#   replies    tokens to JSON;  stream: tokens to events
#   misbehave  a transport that fails on purpose
#   app        routes;  serving: socket and signals
#
# The engine runs in this process, in one thread.  The server is a process of its own already,
# its clients being at the other end of a socket; and a stream whose client has gone is ended
# between two tokens, which a pipe to a child would have to drain.
