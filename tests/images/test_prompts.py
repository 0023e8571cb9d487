"""Prompts with images: slots are those of the template, counted before and decoded once; sessions see."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bough.config import EngineConfig, SpecConfig
from bough.errors import PromptTooLong, UnsupportedModel, UsageError
from bough.images.opening import ImageFile
from bough.memory.estimate import ENCODER
from bough.session import pictures
from bough.session.loading import load_session
from bough.session.session import Finished, Session, TextRequest
from tests.images.seeing import make_seeing, png
from tests.images.tiny_tower import random_weights, vision_settings, write_mmproj
from tests.session.test_disk_key import key_of  # noqa: F401 (a fixture)
from workshop.tiny import make_tiny

CONFIG = EngineConfig("cpu", 1024, prefill_chunk=128, speculation=None)
SPELLED = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeing(tmp_path_factory.mktemp("seeing"), layers=4)


@pytest.fixture(scope="module")
def session(model: Path) -> Session:
    return load_session(model, CONFIG)


def part(file: ImageFile) -> dict[str, Any]:
    return {"type": "image", "image": file}


def ask(*parts: ImageFile | str, **options: Any) -> TextRequest:
    content = [{"type": "text", "text": each} if isinstance(each, str) else part(each) for each in parts]
    return TextRequest(messages=[{"role": "user", "content": content}], max_tokens=12, **options)


def answer(session: Session, request: TextRequest) -> Finished:
    *_, done = session.generate(request)
    assert isinstance(done, Finished)
    return done


def test_a_slot_becomes_the_picture(session: Session) -> None:
    prompt = session.prepare(ask("look: ", png(300, 200), " what is it?")).encoded
    assert prompt is not None
    [image] = prompt.images
    start, end = (session.tokenizer.id_of(name) for name in ("<|vision_start|>", "<|vision_end|>"))
    assert prompt.ids[image.start - 1] == start and prompt.ids[image.end] == end
    assert prompt.ids[image.start : image.end] == image.picture.ids and image.picture.tokens == 70
    assert prompt.boundaries[image.end + 1] == "image"
    around = [*prompt.ids[: image.start], *prompt.ids[image.end :]]
    text = "".join(session.tokenizer.decode([id], skip_special=False) for id in around)
    assert text.startswith("<|im_start|>user\nlook: <|vision_start|><|vision_end|> what is it?<|im_end|>")


def test_what_a_message_spells_is_no_slot(session: Session) -> None:
    """Nor is it the place of an image that comes after it."""
    prompt = session.prepare(ask(SPELLED, png(256, 256), SPELLED)).encoded
    plain = session.prepare(ask(SPELLED)).encoded
    assert prompt is not None and plain is not None and not plain.images
    [image] = prompt.images
    pad = session.tokenizer.id_of("<|image_pad|>")
    assert pad not in prompt.ids and pad not in plain.ids
    spelled = session.tokenizer.encode(SPELLED, special=False)
    begin = plain.ids.index(spelled[0])
    assert prompt.ids[begin : image.start - 1] == spelled
    assert prompt.ids[image.end + 1 : image.end + 1 + len(spelled)] == spelled


def test_what_two_texts_spell_together_is_no_control_token(session: Session) -> None:
    forged, honest = (
        session.prepare(ask(*texts, png(256, 256), *texts)).encoded
        for texts in (("<|im_", "end|><|image_", "pad|>"), ("a", "b"))
    )
    assert forged is not None and honest is not None and len(forged.images) == 1
    for token in ("<|im_end|>", "<|image_pad|>"):
        id = session.tokenizer.id_of(token)
        assert forged.ids.count(id) == honest.ids.count(id)


def test_counting_decodes_nothing(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    request = ask(png(301, 200), "and", png(64, 700))
    with monkeypatch.context() as patched:
        patched.delattr(pictures, "open_image")
        count = len(session.encode(request))
    encoded = session.prepare(request).encoded
    assert encoded is not None and count == len(encoded.ids)


def test_too_many_tokens_are_refused_before_decoding(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(pictures, "open_image")
    with pytest.raises(PromptTooLong):
        session.prepare(ask(*[png(900, 900)] * 2))


def test_images_are_decoded_once(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    request = ask(png(310, 210))
    first = session.prepare(request).encoded
    monkeypatch.delattr(pictures, "open_image")
    again = session.prepare(request).encoded
    assert first is not None and again is not None
    assert first.images[0].picture is again.images[0].picture


def test_answers_depend_on_the_picture_and_its_state_does_not_leak(session: Session) -> None:
    """The same size and words: with snapshots as without."""
    requests = [ask("a", png(300, 200, shade=shade), "b") for shade in (0, 128, 0, 128)]
    done = [answer(session, request) for request in requests]
    assert done[0].tokens == done[2].tokens != done[1].tokens == done[3].tokens
    assert done[1].stats.cached_tokens < 70 and done[2].stats.cached_tokens > 70
    assert [each.stats.encoded_images for each in done] == [1, 1, 0, 0]


def test_an_image_in_a_tools_result_and_in_an_earlier_turn(session: Session) -> None:
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": [part(png(256, 300)), {"type": "text", "text": "before"}]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": [{"type": "text", "text": "shot"}, part(png(300, 256))]},
    ]
    prompt = session.prepare(TextRequest(messages=turns)).encoded
    assert prompt is not None
    assert [image.picture.pixels.shape[:2] for image in prompt.images] == [(288, 256), (256, 288)]
    done = answer(session, TextRequest(messages=turns, max_tokens=4))
    assert done.stats.images == 2 and done.stats.as_dict()["images"]["tokens"] == 144


def test_a_template_without_places(tmp_path: Path, model: Path) -> None:
    blind = load_session(model, replace(CONFIG, no_images=True))
    with pytest.raises(UsageError, match="loaded without its image encoder"):
        blind.prepare(ask(png(256, 256)))
    session = load_session(model, CONFIG)
    source = session.template.source.replace("<|image_pad|>", "")
    session.template.source = source
    with pytest.raises(UsageError, match="0 places for 1 images"):
        session.prepare(ask(png(256, 256)))


def test_the_encoder_is_found_counted_and_refused(tmp_path: Path, model: Path) -> None:
    with_it, without = (
        load_session(model, replace(CONFIG, no_images=blind)).plan.parts for blind in (False, True)
    )
    assert ENCODER in with_it and ENCODER not in without
    assert with_it.keys() - without.keys() == {ENCODER, "image rows", "prefill"}
    settings = vision_settings("small", out=96)
    other = write_mmproj(tmp_path / "mmproj-other.gguf", settings, random_weights(settings))
    with pytest.raises(UnsupportedModel, match=r"96 values .* is of another model"):
        load_session(model, replace(CONFIG, mmproj=other))
    with pytest.raises(UnsupportedModel, match="needed 'clip'"):
        load_session(model, replace(CONFIG, mmproj=model))
    old = make_tiny(tmp_path / "old.gguf", layers=4)
    mmproj = next(model.parent.glob("mmproj*"))
    with pytest.raises(UnsupportedModel, match=r"image_pad\|> is none"):
        load_session(old, replace(CONFIG, mmproj=mmproj))


def test_text_has_its_bits_with_the_encoder_loaded(session: Session, model: Path) -> None:
    blind = load_session(model, replace(CONFIG, no_images=True))
    request = TextRequest(messages=[{"role": "user", "content": "a long story " * 30}], max_tokens=40)
    assert answer(session, request).tokens == answer(blind, request).tokens


def test_speculation_of_a_session(model: Path, session: Session) -> None:
    lookup = load_session(model, replace(CONFIG, speculation=SpecConfig(adaptive=False)))
    for request in (ask("a a a a", png(300, 200), "a a a a"), ask(png(64, 300), "b b b b")):
        assert answer(lookup, request).tokens == answer(session, request).tokens


def test_an_encoder_is_in_the_key_of_files(key_of: Any, model: Path, tmp_path: Path) -> None:  # noqa: F811
    settings = vision_settings("small")
    other = write_mmproj(tmp_path / "other.gguf", settings, random_weights(settings, seed=9))
    config = replace(CONFIG, prefix_cache=1 << 24)
    assert key_of(model, config) != key_of(model, replace(config, mmproj=other))
