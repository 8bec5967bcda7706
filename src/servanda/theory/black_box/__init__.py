# Evidence from texts alone, of endpoints that return neither token ids nor logprobs.
