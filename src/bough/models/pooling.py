"""What a file says about a model whose hidden states are pooled: embeddings, rerank. Imports no torch."""

from dataclasses import dataclass
from enum import IntEnum

from bough.errors import UnsupportedModel
from bough.gguf.reader import GGUFFile

CLASSIFIER = "cls.output.weight"  # [labels, width]: a reranker's head
TEMPLATE = "tokenizer.chat_template.rerank"
# As Qwen3-Reranker was trained; its files hold it under that key.
_QWEN3_TEMPLATE = """\
<|im_start|>system
Judge whether the Document meets the requirements based on the Query and the Instruct provided. \
Note that the answer can only be "yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: Given a web search query, retrieve relevant passages that answer the query
<Query>: {query}
<Document>: {document}<|im_end|>
<|im_start|>assistant
<think>

</think>

"""
_RERANKER = "qwen3-reranker"  # in the name of a file without a classifier


class Pooling(IntEnum):
    """GGUF's values of `pooling_type`."""

    mean = 1
    cls = 2
    last = 3
    rank = 4


@dataclass(frozen=True, slots=True)
class VectorSpec:
    """A model whose prompts become vectors, or with Pooling.rank a relevance; it generates no text."""

    pooling: Pooling
    width: int
    template: str = ""  # of Pooling.rank, with {query} and {document}
    labels: tuple[str, ...] = ()  # of the classifier's rows; empty: the file has none

    @property
    def kind(self) -> str:
        return "a reranker" if self.pooling is Pooling.rank else "an embedding model"

    @classmethod
    def from_gguf(cls, file: GGUFFile, width: int) -> "VectorSpec | None":
        """Return what the file says, None for a model that generates text."""
        key = f"{file.architecture}.pooling_type"
        value = file.get(key, int, 0)
        template = file.get(TEMPLATE, str, "")
        if not value and (template or CLASSIFIER in file.tensors or _RERANKER in _names(file)):
            # Perhaps converted as a causal model: its own head then has the tokens yes and no.
            value = Pooling.rank
        if not value:
            return None
        if value not in tuple(Pooling):
            needed = ", ".join(f"{kind.value} ({kind.name})" for kind in Pooling)
            raise UnsupportedModel(f"{file.path}: {key} is {value}, needed {needed}")
        if value != Pooling.rank:
            return cls(Pooling(value), width)
        labels: tuple[str, ...] = ()
        if CLASSIFIER in file.tensors:
            rows = file.tensors[CLASSIFIER].shape[0]
            labels = tuple(file.get(f"{file.architecture}.classifier.output_labels", list, ["yes", "no"]))
            if rows != len(labels) or rows < 2 or "yes" not in labels:
                raise UnsupportedModel(
                    f"{file.path}: {CLASSIFIER} has {rows} rows for the labels {', '.join(labels)}, "
                    "needed yes and another label, and a row for each"
                )
        return cls(Pooling.rank, width, template or _QWEN3_TEMPLATE, labels)


def _names(file: GGUFFile) -> str:
    keys = ("general.name", "general.basename")
    return " ".join([*(file.get(key, str, "") for key in keys), file.path.stem]).lower().replace(" ", "-")
