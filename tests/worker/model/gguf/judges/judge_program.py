"""llama.cpp, run in the environment of the judges: `python judge_program.py FILE.gguf REQUEST.json ANSWER.npz`.

The request has `texts`, each answered by its token ids, and `ids`, answered by the logits after
each. `prompts`, of token ids, are answered by `steps` more each, greedily, with the LoRA `adapter` if
there is one. The path of modules has the laboratory's own program for llama.cpp.
"""

import json
import os
import sys
from ctypes import c_bool, c_char_p, c_float, c_int, c_int32, c_size_t, c_void_p
from pathlib import Path

import numpy as np
from llama_program import Llama


class Judge(Llama):
    def tokenize(self, text):
        """Special tokens at the ends as the file says; none are read in the text."""
        vocabulary, encoded = c_void_p(self._call("llama_model_get_vocab", c_void_p, self._model)), text.encode()
        ids = (c_int32 * (2 * len(encoded) + 16))()
        given = c_char_p(encoded), c_int32(len(encoded)), ids, c_int32(len(ids)), c_bool(True), c_bool(False)
        count = self._call("llama_tokenize", c_int, vocabulary, *given)
        assert count >= 0, text
        return ids[:count]

    def logits(self, ids):
        return np.ctypeslib.as_array(self.read(ids), (len(ids), self.vocab_size)).copy()

    def adapt(self, path):
        """Applies a LoRA adapter, with its own scale."""
        adapter = c_void_p(self._call("llama_adapter_lora_init", c_void_p, self._model, c_char_p(path.encode())))
        assert adapter, path
        arguments = (c_void_p * 1)(adapter), c_size_t(1), (c_float * 1)(1.0)
        assert self._call("llama_set_adapters_lora", c_int, self._context, *arguments) == 0

    def continued(self, ids, steps):
        """The token ids after `ids`, always the likeliest."""
        self.restart()
        found, given = [], ids
        for _ in range(steps):
            logits = np.ctypeslib.as_array(self.read(given, only_last=True), (self.vocab_size,))
            given = [int(np.argmax(logits))]
            found += given
        return found


def main():
    path, request_file, answer_file = sys.argv[1:]
    request = json.loads(Path(request_file).read_text())
    ids = request["ids"]
    prompts, steps = request.get("prompts", []), request.get("steps", 0)
    longest = max([len(ids), *(len(prompt) + steps for prompt in prompts)])
    judge = Judge(path, max_tokens=longest, at_once=longest, threads=os.cpu_count())
    if request.get("adapter"):
        judge.adapt(request["adapter"])
    answers = np.array([judge.continued(prompt, steps) for prompt in prompts])
    texts = json.dumps([judge.tokenize(text) for text in request["texts"]])
    np.savez(answer_file, texts=np.array(texts), answers=answers, logits=judge.logits(ids) if ids else np.empty(0, np.float32))


if __name__ == "__main__":
    main()
