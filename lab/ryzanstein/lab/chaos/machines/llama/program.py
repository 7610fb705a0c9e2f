"""llama.cpp's HTTP server: `python program.py FILE.gguf CONTEXT SLOTS ADDRESS PORT`, in an environment with xllamacpp.

Port 0 is a free one. It prints its address when it serves. Keys and values are 32-bit, so that its numbers are near ours. It
imports nothing of the project.
"""

import signal
import sys


def main() -> None:
    import xllamacpp

    path, context, slots, address, port = sys.argv[1:]
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx = int(context) * int(slots)
    params.n_parallel = int(slots)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = 0  # GGML_TYPE_F32
    params.cache_ram_mib = 0
    params.fit_params = False
    params.warmup = False
    params.hostnames = [address]
    params.port = int(port)
    params.flash_attn_type = 0  # its kernel multiplies in 16 bits
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
