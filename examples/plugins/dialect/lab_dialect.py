# The dialect `lab`: vLLM behind a proxy that counts the requests of each user.

from servanda.engines.http.dialects.base import DIALECTS
from servanda.engines.http.dialects.vllm import VLLM


@DIALECTS.register("lab")
class Lab(VLLM):
    """`dialect: lab`. Another kind of server subclasses `Dialect` of the first module instead."""

    name = "lab"

    def draw(self, sequence, server, meaning):
        return _counted(super().draw(sequence, server, meaning))

    def score(self, sequence, server, path):
        return _counted(super().score(sequence, server, path))


def _counted(request):
    endpoint, body = request
    return endpoint, {**body, "user": "servanda"}
