# Any engine behind the OpenAI API, in vLLM's dialect: the server of demos and tests.
#
#   parse             what a request asks, and what is refused
#   scheduler         the queue, and the one thread that owns the engine: jobs to engine verbs
#   responses         tokens to JSON
#   fault_injection   a transport that fails on purpose
#   app               the routes, and one request: encode, queue, collect its results
#   process, sockets  socket and signals
#
# The engine runs in this process, in one thread.  The server is a process of its own already,
# its clients being at the other end of a socket; and a stream whose client has gone is ended
# between two tokens, which a pipe to a child would have to drain.
