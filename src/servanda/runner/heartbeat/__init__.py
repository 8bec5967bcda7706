# A heartbeat: has an endpoint that returns only texts changed since its reference was made?
