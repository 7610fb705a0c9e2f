"""llama.cpp, run in the environment of the judges: `python llama_program.py FILE.gguf REQUEST.json ANSWER.npz`.

The request has `texts`, each answered by its token ids, and `ids`, answered by the logits after
each. The library is that of the package xllamacpp, whose own interface gives neither. Parameters
are passed as llama.cpp's defaults, in a buffer that is larger than any of the structures.
"""

import ctypes
import json
import sys
from ctypes import POINTER, c_bool, c_char, c_char_p, c_float, c_int, c_int8, c_int32, c_uint32, c_void_p
from pathlib import Path

import numpy as np
import xllamacpp

SHOWN_ERRORS = 12


class Parameters(ctypes.Structure):
    _fields_ = (("content", c_char * 1024),)


class Batch(ctypes.Structure):
    _fields_ = (
        ("num_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embedding", c_void_p),
        ("position", POINTER(c_int32)),
        ("num_sequences", POINTER(c_int32)),
        ("sequence", POINTER(POINTER(c_int32))),
        ("wanted", POINTER(c_int8)),
    )


(_LIBRARY,) = Path(xllamacpp.__file__).parent.glob("xllamacpp*.so")
library = ctypes.CDLL(str(_LIBRARY))
messages = []


@ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)
def keep(_level, text, _data):
    messages.append(text.decode(errors="replace"))


def function(name, result, *arguments):
    found = getattr(library, name)
    found.restype, found.argtypes = result, arguments
    return found


class Llama:
    def __init__(self, path, context_length):
        function("llama_log_set", None, c_void_p, c_void_p)(ctypes.cast(keep, c_void_p), None)
        function("llama_backend_init", None)()
        parameters = function("llama_model_default_params", Parameters)()
        self.model = function("llama_model_load_from_file", c_void_p, c_char_p, Parameters)(path.encode(), parameters)
        if not self.model:
            sys.exit("".join(messages[-SHOWN_ERRORS:]))
        self.vocabulary = function("llama_model_get_vocab", c_void_p, c_void_p)(self.model)
        self.vocab_size = function("llama_vocab_n_tokens", c_int, c_void_p)(self.vocabulary)
        self.context_length = context_length

    def tokenize(self, text):
        """Special tokens at the ends as the file says; none are read in the text."""
        encoded = text.encode()
        ids = (c_int32 * (2 * len(encoded) + 16))()
        tokenize = function("llama_tokenize", c_int, c_void_p, c_char_p, c_int32, POINTER(c_int32), c_int32, c_bool, c_bool)
        count = tokenize(self.vocabulary, encoded, len(encoded), ids, len(ids), True, False)
        assert count >= 0, text
        return ids[:count]

    def logits(self, ids):
        parameters = function("llama_context_default_params", Parameters)()
        sizes = ctypes.cast(ctypes.pointer(parameters), POINTER(c_uint32))
        sizes[0] = sizes[1] = sizes[2] = self.context_length  # of the context, a batch, a part of a batch
        context = function("llama_init_from_model", c_void_p, c_void_p, Parameters)(self.model, parameters)
        batch = function("llama_batch_init", Batch, c_int32, c_int32, c_int32)(len(ids), 0, 1)
        batch.num_tokens = len(ids)
        for place, token_id in enumerate(ids):
            batch.token[place], batch.position[place] = token_id, place
            batch.num_sequences[place], batch.sequence[place][0], batch.wanted[place] = 1, 0, 1
        assert function("llama_decode", c_int, c_void_p, Batch)(context, batch) == 0
        row = function("llama_get_logits_ith", POINTER(c_float), c_void_p, c_int32)
        return np.stack([np.ctypeslib.as_array(row(context, i), (self.vocab_size,)).copy() for i in range(len(ids))])


def main():
    path, request_file, answer_file = sys.argv[1:]
    request = json.loads(Path(request_file).read_text())
    llama = Llama(path, max(256, len(request.get("ids", ()))))
    texts = json.dumps([llama.tokenize(text) for text in request.get("texts", ())])
    logits = llama.logits(request["ids"]) if request.get("ids") else np.empty(0, np.float32)
    np.savez(answer_file, texts=np.array(texts), logits=logits)


if __name__ == "__main__":
    main()
