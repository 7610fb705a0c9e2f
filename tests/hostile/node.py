"""`python -m tests.hostile.node`: the benchmarks' scripted node, for any prompt.

One that is a number is the pace of its answer, within bounds.
"""

from __future__ import annotations

import uvloop

from ryzanstein.lab.bench.router.scripted import node as scripted_node
from ryzanstein.lab.bench.router.scripted.link import ScriptedLink
from ryzanstein.observe import log as logs
from ryzanstein.v1 import inference_pb2 as inference


class AnyPromptLink(ScriptedLink):
    def _submit(self, submit) -> None:
        messages = submit.messages.messages
        try:
            pace = str(min(max(float(messages[-1].content), 0.001), 0.05))
        except (IndexError, ValueError):
            pace = "0.001"
        del messages[:]
        messages.append(inference.Message(role=inference.ROLE_USER, content=pace))
        submit.sampling.max_tokens = min(submit.sampling.max_tokens or 2, 1000)
        super()._submit(submit)


if __name__ == "__main__":
    logs.setup("node", "warning")
    scripted_node.ScriptedLink = AnyPromptLink
    uvloop.run(scripted_node.serve())
