"""llama.cpp's server as a process of its own: python llama.py MODEL.gguf WINDOW KEY. It prints its address, and ends
with its input. The same model, prompt and single thread give the same reply."""
import sys
from pathlib import Path

import xllamacpp

params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.api_keys = sys.argv[1], int(sys.argv[2]), [sys.argv[3]]
params.n_parallel = params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
params.sampling.temp, params.n_predict, params.warmup, params.verbosity = 0, 60, False, 1
params.chat_template = Path(__file__).with_suffix(".jinja").read_text(encoding="utf-8")
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
sys.stdin.read()
