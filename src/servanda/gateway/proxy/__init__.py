# The proxy: the OpenAI API before two pools of servers, routed by a snapshot of its controller.
