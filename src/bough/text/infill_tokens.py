"""The tokens with which a model fills in the middle, from a file's keys or by their names."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

# By part: the keys of a file, newest first, then the names that models have for it.
_PARTS: Mapping[str, tuple[str, str]] = {
    "prefix": (
        "fim_pre_token_id prefix_token_id",
        "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|>",
    ),
    "suffix": (
        "fim_suf_token_id suffix_token_id",
        "<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|>",
    ),
    "middle": (
        "fim_mid_token_id middle_token_id",
        "<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|>",
    ),
    "repository": ("fim_rep_token_id", "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>"),
    "file": ("fim_sep_token_id", "<|file_sep|>"),
    "padding": ("fim_pad_token_id", "<|fim_pad|> <fim-pad> <fim_pad> <PAD>"),
}


@dataclass(frozen=True, slots=True)
class InfillTokens:
    prefix: int
    suffix: int
    middle: int
    repository: int | None  # before the name of a repository
    file: int | None  # before the name of a file

    @classmethod
    def of(
        cls, ids: Mapping[str, int], id_of_key: Callable[[str], int | None]
    ) -> "tuple[InfillTokens | None, frozenset[int]]":
        """Return the tokens, None unless there are the three of a gap, and those that end its text.

        ids: of the vocabulary's special tokens.
        """
        parts: dict[str, int | None] = {}
        for part, (keys, names) in _PARTS.items():
            candidates = (*map(id_of_key, keys.split()), *map(ids.get, names.split()))
            parts[part] = next((id for id in candidates if id is not None), None)
        prefix, suffix, middle, repository, file, padding = parts.values()
        ends = frozenset(id for id in (padding, repository, file) if id is not None)
        if prefix is None or suffix is None or middle is None:
            return None, ends
        return cls(prefix, suffix, middle, repository, file), ends
