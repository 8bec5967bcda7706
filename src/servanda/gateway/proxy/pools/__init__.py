# The pools: their servers, which of them a request is sent to, and which are not used now.
