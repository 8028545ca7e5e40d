"""Complete a few prompts from Python.

``python examples/quickstart.py`` runs in one process, ``mpirun -n 3 python examples/quickstart.py`` over three ranks:
every rank runs the same lines, rank 0 gets the completions.
"""

from fastdecode_hpc import Engine, RunConfig, SamplingParams

with Engine(RunConfig(model="smollm2", max_context_len=512)) as engine:
    prompts = ["The capital of France is", "Water boils at", "Three colours of the rainbow are"]
    for completion in engine.generate(prompts, SamplingParams(max_new_tokens=16)):
        print(repr(completion.request.prompt), "->", repr(completion.text))
