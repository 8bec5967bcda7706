# Evidence from texts alone, of endpoints that tell neither token ids nor logprobs.
