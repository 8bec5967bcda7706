# A heartbeat: has an endpoint that tells only texts changed since its reference was made?
