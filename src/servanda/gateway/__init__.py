# The gateway: the OpenAI API before two pools of servers.  It follows a snapshot of routes.
