"""Greedy text of a model on a CPU against llama.cpp's best token at each position, near-ties shown.

    python -m workshop llama_text MODEL LIBRARIES --data DATA [--reference FILE] [--prompts 5] [--n-gen 64]

llama.cpp (libllama and libggml in the folder LIBRARIES) is fed with our text. It rounds the activations of
quantised matmuls to 8 bits: FILE, the same model with its weights expanded to float32
(`expanded`, by the gguf package), has llama.cpp compute them in float32.
"""

from pathlib import Path

import gguf
import numpy as np

from bough.config import EngineConfig
from bough.session.loading import load_session
from bough.session.requests import TextRequest
from workshop.case import case
from workshop.cpu_text import decode, texts
from workshop.llama_library import LlamaCpp
from workshop.report import Report


@case(device="cpu")
def main(
    report: Report,
    model: Path,
    libraries: Path,
    *,
    data: Path,
    reference: Path | None = None,
    prompts: int = 5,
    n_gen: int = 64,
    threads: int = 1,
) -> None:
    session = load_session(model, EngineConfig("cpu", max_ctx=2048, threads=threads, prefix_cache=0))
    llama = LlamaCpp(libraries, reference or expanded(model), threads=threads, context=2048)
    tokens, ties = 0, []
    for index, text in enumerate(texts(data, prompts)):
        prompt = session.encode(TextRequest(messages=[{"role": "user", "content": text}]))
        output = decode(session, prompt, n_gen)
        llama.clear()
        llama.decode([*prompt, *output[:-1]], every_logit=True)
        logits = llama.rows(len(output))
        for at in np.flatnonzero(logits.argmax(1) != output):
            best = int(logits[at].argmax())
            gap = float(logits[at, best] - logits[at, output[at]])
            ties.append({"prompt": index, "token": int(at), "ours": output[at], "best": best, "gap": gap})
        tokens += len(output)
    report.line(**report.head(), what="llama_text", tokens=tokens, equal=tokens - len(ties), ties=ties)


def expanded(model: Path) -> Path:
    """Write the model with all weights in float32 beside it; return the file."""
    path = model.with_suffix(".f32.gguf")
    if path.exists():
        return path
    source, kept = gguf.GGUFReader(model), ("GGUF.", "general.architecture", "general.file_type")
    writer = gguf.GGUFWriter(path, source.fields["general.architecture"].contents())
    for field in source.fields.values():
        if not field.name.startswith(kept):
            kind, *_ = field.types
            if kind == gguf.GGUFValueType.ARRAY:
                writer.add_array(field.name, field.contents())
            else:
                writer.add_key_value(field.name, field.contents(), kind)
    for tensor in source.tensors:
        weights = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, weights.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
