# Any engine behind the OpenAI API, in vLLM's dialect: the server of demos and tests.
#
#   fields, wire, ask    what a request asks, and what is refused
#   asking, answers      one request: encode, queue, collect
#   batching             the queue, and the one thread that owns the engine
#   jobs, running        asked for together, run together: jobs to engine verbs
#   replies, chats       tokens to JSON;  stream: tokens to events;  texts: to words
#   misbehave            a transport that fails on purpose
#   app, failing         routes and errors;  serving: socket and signals
#
# The engine runs in this process, in one thread.  The server is a process of its own already,
# its clients being at the other end of a socket; and a stream whose client has gone is ended
# between two tokens, which a pipe to a child would have to drain.
