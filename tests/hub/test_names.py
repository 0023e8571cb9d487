"""Names of models, and which files they pick."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.errors import ModelNotFound, UsageError
from bough.hub.names import (
    GGUFSet,
    RepoName,
    choose,
    draft_sidecars,
    extra_needed,
    group,
    one_checkpoint,
    parse_repo,
)

REPO = RepoName("u/r")


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("unsloth/Qwen3.6-27B-GGUF", RepoName("unsloth/Qwen3.6-27B-GGUF")),
        ("unsloth/Qwen3.6-27B-GGUF:UD-Q4_K_XL", RepoName("unsloth/Qwen3.6-27B-GGUF", "UD-Q4_K_XL")),
        ("hf://u/r:q8_0", RepoName("u/r", "q8_0")),
        ("hf.co/u/r:Q8_0", RepoName("u/r", "Q8_0")),
        ("https://huggingface.co/u/r", RepoName("u/r")),
        ("https://huggingface.co/u/r/", RepoName("u/r")),
        ("https://huggingface.co/u/r/tree/main", RepoName("u/r")),
        ("https://huggingface.co/u/r/blob/main/a/m-Q8_0.gguf?x=1", RepoName("u/r", file="a/m-Q8_0.gguf")),
        ("https://huggingface.co/u/r/resolve/main/m.gguf", RepoName("u/r", file="m.gguf")),
        ("hf://u/r/m.gguf", RepoName("u/r", file="m.gguf")),
        ("model.gguf", None),
        ("folder/model.gguf", None),
        ("./u/r", None),
        ("/u/r", None),
        ("~/u", None),
        ("a/b/c", None),
        ("qwen3.6-27b", None),
        ("what is this", None),
    ],
)
def test_parsing(name, wanted):
    assert parse_repo(name) == wanted


@pytest.mark.parametrize("name", ["u/r:", "hf://", "hf://u", "https://huggingface.co/u", "hf://u/r/file.txt"])
def test_invalid_names(name):
    with pytest.raises(UsageError):
        parse_repo(name)


@given(st.text(max_size=40))
def test_parsing_any_text_gives_a_name_or_a_usage_error(text):
    try:
        found = parse_repo(text)
    except UsageError:
        return
    assert found is None or found.repo.count("/") == 1


FILES = [
    "model-BF16.gguf",
    "model-IQ4_XS.gguf",
    "model-PTQ1_0.gguf",
    "model-Q4_K_M.gguf",
    "model-Q4_K_S.gguf",
    "model-Q8_0.gguf",
    "model-UD-Q4_K_XL.gguf",
    "mmproj-BF16.gguf",
    "mtp-model-Q4_K_M.gguf",
    "dflash-model-Q4_K_M.gguf",
    "eagle3-model-Q8_0.gguf",
    "dspark-model-Q5_K_M.gguf",
    "imatrix_unsloth.gguf",
    "model.imatrix.gguf",
    "README.md",
    "F16/model-F16-00001-of-00002.gguf",
    "F16/model-F16-00002-of-00002.gguf",
]


def sets(*names: str) -> list[GGUFSet]:
    return group((name, 1_000_000_000) for name in names)


@pytest.mark.parametrize(
    ("quant", "wanted"),
    [
        (None, "model-Q4_K_M.gguf"),
        ("q4_k_m", "model-Q4_K_M.gguf"),
        ("Q8_0", "model-Q8_0.gguf"),
        ("UD-Q4_K_XL", "model-UD-Q4_K_XL.gguf"),
        ("Q4_K_XL", "model-UD-Q4_K_XL.gguf"),
        ("bf16", "model-BF16.gguf"),
        ("iq4_xs", "model-IQ4_XS.gguf"),
        ("PTQ1_0", "model-PTQ1_0.gguf"),
        ("F16", "F16/model-F16-00001-of-00002.gguf"),
    ],
)
def test_choosing_by_quantisation(quant, wanted):
    assert choose(sets(*FILES), RepoName("u/r", quant)).files[0] == wanted


def test_a_sidecar_is_never_the_target():
    with pytest.raises(ModelNotFound, match="u/r has no Q5_K_M; it has"):
        choose(sets(*FILES), RepoName("u/r", "Q5_K_M"))
    assert choose(sets("m-Q6_K.gguf", "mtp-m-Q8_0.gguf"), REPO).files == ("m-Q6_K.gguf",)
    drafts = draft_sidecars((name, 1) for name in FILES)
    assert [each.files[0] for each in drafts] == ["dflash-model-Q4_K_M.gguf", "dspark-model-Q5_K_M.gguf"]
    everything = group(((name, 1) for name in FILES), sidecars=True)
    assert len(everything) == len(sets(*FILES)) + 4
    # A name that only begins like one of them is a target's.
    assert choose(sets("mtpx-Q4_K_M.gguf"), REPO).files == ("mtpx-Q4_K_M.gguf",)


@pytest.mark.parametrize(
    ("files", "one"),
    [
        (["model.safetensors"], True),
        (["m-00002-of-00002.safetensors", "m-00001-of-00002.safetensors"], True),
        (["m-00001-of-00002.safetensors"], False),
        (["m-00001-of-00003.safetensors", "m-00003-of-00003.safetensors"], False),
        (["m-00001-of-00002.safetensors", "n-00002-of-00002.safetensors"], False),
        (["a.safetensors", "b.safetensors"], False),
        ([], False),
    ],
)
def test_shards_of_one_checkpoint(files, one):
    assert one_checkpoint(files) == one


def test_split_files_belong_together():
    (found,) = [each for each in sets(*FILES) if each.label == "F16"]
    assert found == GGUFSet(tuple(FILES[-2:]), 2_000_000_000) and found.complete
    (half,) = sets(FILES[-1])
    assert not half.complete


@given(st.permutations(range(1, 8)))
def test_parts_come_in_order_whatever_the_listing(order):
    (found,) = sets(*(f"m-Q4_0-{number:05d}-of-00007.gguf" for number in order))
    assert [int(name.split("-")[2]) for name in found.files] == list(range(1, 8))
    assert found.complete


def test_a_part_of_a_quantisations_name_is_not_enough():
    with pytest.raises(ModelNotFound, match=r"u/r has no Q4_K; it has .*Q4_K_M \(1.0 GB\)") as caught:
        choose(sets(*FILES), RepoName("u/r", "Q4_K"))
    assert caught.value.hint.startswith("for example u/r:")


def test_without_a_quantisation_the_only_model_is_meant():
    assert choose(sets("some-Q6_K.gguf"), REPO).files == ("some-Q6_K.gguf",)
    with pytest.raises(ModelNotFound, match=r"has no Q4_K_M \(the default\); it has Q6_K"):
        choose(sets("some-Q6_K.gguf", "some-Q8_0.gguf"), REPO)


def test_two_models_of_one_quantisation_are_not_guessed():
    both = sets("base-Q4_K_M.gguf", "chat-Q4_K_M.gguf")
    with pytest.raises(
        ModelNotFound, match=r"matches 2 models: base-Q4_K_M.gguf .* chat-Q4_K_M.gguf"
    ) as caught:
        choose(both, REPO)
    assert caught.value.hint == "name one file: hf://u/r/base-Q4_K_M.gguf"
    assert choose(both, RepoName("u/r", file="chat-Q4_K_M.gguf")).files == ("chat-Q4_K_M.gguf",)


def test_files_without_a_quantisation_in_their_name():
    both = sets("first.gguf", "second.gguf")
    with pytest.raises(ModelNotFound) as caught:
        choose(both, REPO)
    assert caught.value.hint == "for example hf://u/r/first.gguf"


@pytest.mark.parametrize("file", ["a-UD-IQ2_XXS.gguf", "a-iq3_s-00001-of-2.gguf", "Q/a-UD-Q4_K_M.gguf"])
def test_files_whose_types_need_the_extra(file: str):
    assert "bough[iq3]" in extra_needed(file)


@pytest.mark.parametrize("file", ["a-Q4_K_M.gguf", "a-IQ4_XS.gguf", "a-UD-Q6_K_XL.gguf"])
def test_files_whose_types_need_nothing(file: str):
    assert extra_needed(file) == ""
