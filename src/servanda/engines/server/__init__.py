# Any engine behind the OpenAI API, in vLLM's dialect: the server of demos and tests.
#
#   fields, parse, request   what a request asks, and what is refused
#   handler                  one request: encode, queue, collect its results
#   scheduler                the queue, and the one thread that owns the engine
#   jobs, executor           asked for together, run together: jobs to engine verbs
#   responses, chat          tokens to JSON;  stream: tokens to events;  detokenizer: to texts
#   fault_injection          a transport that fails on purpose
#   app                      the routes;  process, sockets: socket and signals
#
# The engine runs in this process, in one thread.  The server is a process of its own already,
# its clients being at the other end of a socket; and a stream whose client has gone is ended
# between two tokens, which a pipe to a child would have to drain.
