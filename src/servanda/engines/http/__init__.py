# Engine `openai_http`: a kernel behind a socket, of vLLM, SGLang, llama-server and others.

from servanda.engines.http.engine import HTTPEngine

__all__ = ["HTTPEngine"]
