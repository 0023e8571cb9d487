import itertools
import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.errors import BadGGUF, TemplateFailed, UsageError
from bough.text.template import FALLBACK, ChatTemplate
from bough.text.tokenizer import Tokenizer
from tests.text.templates import QWEN35, TURNS
from tests.text.vocabulary import CONTROL, KEY, trained

METADATA = trained("qwen35")[0] | {"tokenizer.chat_template": QWEN35}
TEMPLATE = ChatTemplate.from_metadata(METADATA)
TOKENIZER = Tokenizer.from_metadata(METADATA)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Wetter für <Ort> & 'Zeit'",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
ASK = {"role": "user", "content": "Hi"}


def render(*messages: dict, **options) -> str:
    return TEMPLATE.render(messages, **options).text


def evaluate(source: str, **options) -> str:
    return ChatTemplate(source).render([ASK], **options).text


def test_generation_prompt_and_thinking():
    asked = "<|im_start|>user\nHi<|im_end|>\n"
    assert render(ASK) == asked + "<|im_start|>assistant\n<think>\n"
    assert render(ASK, thinking=True) == render(ASK)
    assert render(ASK, thinking=False) == asked + "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert render(ASK, enable_thinking=False) == render(ASK, thinking=False)
    assert render(ASK, add_generation_prompt=False) == asked
    assert TEMPLATE.supports_thinking
    assert not ChatTemplate(TURNS).supports_thinking


def test_codex_sends_two_developer_messages_and_two_user_messages():
    text = render(
        {"role": "developer", "content": [{"type": "input_text", "text": "Sandbox rules."}]},
        {"role": "developer", "content": [{"type": "input_text", "text": "Project rules."}]},
        {"role": "user", "content": [{"type": "input_text", "text": "<environment_context/>"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "List the files."}]},
        tools=[WEATHER],
    )
    assert text == (
        f"<|im_start|>system\n# Tools\n\n<tools>\n{json.dumps(WEATHER, ensure_ascii=False)}\n</tools>"
        "\n\nSandbox rules.\n\nProject rules.<|im_end|>\n"
        "<|im_start|>user\n<environment_context/><|im_end|>\n"
        "<|im_start|>user\nList the files.<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )


def test_claude_code_sends_system_inside_the_conversation():
    text = render(
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": [{"type": "text", "text": "Fix it"}, {"type": "text", "text": "now"}]},
        {"role": "system", "content": "Plan mode is on."},
        {"role": "assistant", "content": [{"type": "text", "text": "Done."}]},
        {"role": "user", "content": "Thanks"},
    )
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nFix itnow<|im_end|>\n"
        "<|im_start|>user\n<system>\nPlan mode is on.\n</system><|im_end|>\n"
        "<|im_start|>assistant\nDone.<|im_end|>\n"
        "<|im_start|>user\nThanks<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )


@pytest.mark.parametrize("arguments", ['{"place": "Köln", "days": 2}', {"place": "Köln", "days": 2}])
def test_a_round_of_tool_calls(arguments: object):
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    text = render(
        ASK,
        {"role": "assistant", "content": "Old.", "reasoning_content": "Left out after a new user message."},
        ASK,
        {"role": "assistant", "content": None, "tool_calls": [call, call], "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sunny"}]},
        {"role": "tool", "tool_call_id": "call_2", "content": {"sky": "grün"}},
    )
    spelled = (
        "<tool_call>\n<function=weather>\n<parameter=place>\nKöln\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
    )
    assert text == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nOld.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        f"<|im_start|>assistant\n<think>\nHm.\n</think>\n\n{spelled}\n\n{spelled}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nsunny\n</tool_response>"
        '\n<tool_response>\n{"sky": "grün"}\n</tool_response><|im_end|>\n'
        "<|im_start|>assistant\n<think>\n"
    )


@pytest.mark.parametrize(
    "reply",
    [
        {"content": "Yes.", "reasoning": "Let me see."},
        {"content": "Yes.", "reasoning_content": "Let me see."},
        {"content": "<think>\nLet me see.\n</think>\n\nYes."},
        {"content": "Let me see.\n</think>\n\nYes."},
        {"content": [{"type": "thinking", "thinking": "Let me see."}, {"type": "text", "text": "Yes."}]},
    ],
)
def test_the_template_decides_which_reasoning_it_renders(reply: dict):
    reply = {"role": "assistant", **reply}
    assert "<think>\nLet me see.\n</think>\n\nYes." in render(ASK, reply)
    assert "Let me see." not in render(ASK, reply, ASK)


def test_the_last_message_is_continued():
    template = ChatTemplate(QWEN35, controls=["<|im_start|>", "<|im_end|>"])
    asked = {"role": "user", "content": "Hi"}

    def continued(thinking: bool | None = None, **message: str) -> str:
        turns = [asked, {"role": "assistant", **message}]
        found = template.render(turns, thinking=thinking, continue_final=True, boundaries=True)
        assert found.boundaries == template.render([asked], boundaries=True).boundaries
        return found.text.removeprefix("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")

    assert continued(content="Yes ") == "<think>\n\n</think>\n\nYes "
    assert continued(thinking=True, content="Yes") == continued(content="Yes")
    assert continued(content="Yes", reasoning_content="Hm.") == "<think>\nHm.\n</think>\n\nYes"
    assert continued(content="", reasoning_content="Hm") == "<think>\nHm"
    assert continued(content="") == "<think>\n"
    spelled = template.render([asked, {"role": "assistant", "content": "a <|im_end|>"}], continue_final=True)
    assert [spelled.text[a:b] for a, b in spelled.literals] == ["<|im_end|>"]
    plain = ChatTemplate.from_metadata({})
    begun = [asked, {"role": "assistant", "content": "Yes"}]
    assert plain.render(begun, continue_final=True).text.endswith("<|im_start|>assistant\nYes")
    for last in (asked, {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}):
        with pytest.raises(UsageError, match="the last message has"):
            template.render([asked, last], continue_final=True)


def test_a_past_answer_about_tags_is_whole():
    for content, source in itertools.product(
        ("The tag </think> ends it.", "thought\n</think>\n\nYes."), (TURNS, FALLBACK, QWEN35)
    ):
        turns = [ASK, {"role": "assistant", "content": content}, ASK]
        text = ChatTemplate(source).render(turns).text
        cut = source is QWEN35 and content.startswith("thought")  # its prompt begins the thought
        assert (content in text) != cut
        assert "thought" not in text or not cut


def test_template_variables():
    for name in ("self", "cls", "extra", "a b", ""):
        assert TEMPLATE.render([ASK], **{name: "x"}).text == TEMPLATE.render([ASK]).text
    with pytest.raises(UsageError, match="'messages' cannot be set"):
        TEMPLATE.render([ASK], **{"messages": "x"})


def test_messages_are_merged_for_templates_that_require_alternating_roles():
    template = ChatTemplate(TURNS, bos="<s>", eos="</s>")
    messages = [ASK, {"role": "user", "content": "there"}, {"role": "system", "content": "new rule"}]
    text = template.render(messages).text
    assert text == "<s>[user] Hi\n\nthere\n\n<system>\nnew rule\n</system></s>"


def test_an_error_has_the_message_of_the_template():
    with pytest.raises(TemplateFailed, match=r"No user query found in messages\."):
        render({"role": "system", "content": "Alone"})


def test_a_file_without_a_template_gets_chatml():
    metadata = trained("qwen35")[0]
    fallback = ChatTemplate.from_metadata(metadata)
    assert fallback.is_fallback
    assert not TEMPLATE.is_fallback
    system = {"role": "developer", "content": "Be brief."}
    assert fallback.render([system, ASK]).text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert fallback.render([ASK], add_generation_prompt=False).text == "<|im_start|>user\nHi<|im_end|>\n"
    with pytest.raises(TemplateFailed, match="describe tools"):
        fallback.render([ASK], tools=[WEATHER])


def test_templates_can_use_the_tokens_of_the_file():
    source = "{{ bos_token }}|{{ eos_token }}"
    metadata = trained("qwen35")[0] | {"tokenizer.chat_template": source, f"{KEY}bos_token_id": 500}
    assert ChatTemplate.from_metadata(metadata).render([ASK]).text == "<|endoftext|>|<|im_end|>"
    with pytest.raises(BadGGUF, match=r"m\.gguf: tokenizer\.chat_template is of type list"):
        ChatTemplate.from_metadata({"tokenizer.chat_template": []}, source="m.gguf")


def test_filters_and_functions_of_templates():
    assert evaluate("{{ {'a': '<é>&'} | tojson }}") == '{"a": "<é>&"}'
    assert evaluate("{{ {'b': 1, 'a': [1]} | tojson(indent=1, sort_keys=true) }}") == (
        '{\n "a": [\n  1\n ],\n "b": 1\n}'
    )
    assert evaluate("{{ {'a': 1} | tojson(separators=(',', ':')) }}") == '{"a":1}'
    assert evaluate("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert evaluate("a{% generation %}{{ messages[0].content }}{% endgeneration %}b") == "aHib"
    assert evaluate("{{ strftime_now('%Y') | int > 2000 }}") == "True"
    assert evaluate("{{ flavour }}", flavour="sweet") == "sweet"
    assert evaluate("  {% if true %}\n  x\n  {% endif %}\ny") == "  x\ny"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ (strftime_now | attr('__globals__'))['re'] }}",
        "{{ ''['__class__'].mro() }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ '%s' | format(messages.append) }}{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ messages[0].pop('role') }}",
        "{{ self._TemplateReference__context.environment.from_string('x') }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ namespace.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ joiner.__init__.__code__ }}",
        "{{ range(1000000000) | list }}",
    ],
)
def test_the_sandbox_holds(source: str):
    with pytest.raises(TemplateFailed):
        evaluate(source)


@pytest.mark.parametrize("name", ["raise_exception", "strftime_now", "lipsum", "messages", "range"])
def test_the_sandbox_exposes_nothing(name: str):
    for attribute in ("__globals__", "__class__", "__init__", "__code__", "__closure__", "__self__"):
        assert evaluate(f"{{{{ {name}.{attribute} }}}}") == ""


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for a in range(99999) %}{{ 'long text' * 1000 }}{% endfor %}",
        "{% for a in [1] recursive %}{{ loop([a]) }}{% endfor %}",
    ],
)
def test_endless_templates_are_stopped(source: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("bough.text.template.MAX_ITERATIONS", 20_000)
    with pytest.raises(TemplateFailed, match=r"repeats over|writes over|makes over|Recursion"):
        evaluate(source)


@pytest.mark.parametrize(
    "expression",
    [
        "('a' * 3000000000)",
        "(3000000000 * [1])",
        "'a'|center(2000000000)",
        "'a'.center(2000000000)",
        "'a'.ljust(2000000000)",
        "'1'.zfill(2000000000)",
        "'\\t'.expandtabs(2000000000)",
        "'a\\n'|indent(2000000000)",
        "('a' * 100000)|replace('a', 'b' * 100000)",
        "('a' * 100000).replace('a', 'b' * 100000)",
        "('a' * 100000)|join('b' * 100000)",
        "('b' * 100000).join('a' * 100000)",
        "'%2000000000d'|format(1)",
        "('%2000000000d' % 1)",
        "('%*d' % (2000000000, 1))",
        "'{:>2000000000}'.format(1)",
        "'{:>{}}'.format(1, 2000000000)",
        "(9 ** (9 ** 9))",
        "lipsum(n=100000000)",
        "[1]|batch(2000000000, 'x')|list",
        "[1]|tojson(indent=2000000000)",
        "[1]|tojson(false, 2000000000)",
        "[1]|tojson(separators=('a' * 1000000, 'b'))",
    ],
)
def test_no_expression_fills_the_memory(expression: str):
    with pytest.raises(TemplateFailed, match=r"makes over|with a width over|JSON with over"):
        evaluate(f"{{{{ {expression}|string|length }}}}")


@pytest.mark.parametrize("operator", ["+", "~"])
def test_a_text_cannot_be_doubled_for_ever(operator: str):
    source = "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x OP n.x %}{% endfor %}"
    with pytest.raises(TemplateFailed, match="makes over"):
        evaluate(source.replace("OP", operator))


def test_bounds_do_not_change_results():
    source = (
        "{{ 'ab' ~ 1 ~ 'c' ~ none }} {{ 'x'|center(5) }} {{ ['a', 'b']|join('-') }} {{ 'q'.join('ab') }} "
        "{{ '%s-%05d'|format('q', 3) }} {{ '{}:{:>4}'.format(1, 2) }} {{ 'aXb'|replace('X', '-') }} "
        "{{ 2 * 3 + 2 ** 3 }} {{ [1] + [2] * 2 }} {{ 'x'.ljust(3) }} {{ 7 % 4 }} {{ 'a'|list }}"
    )
    assert evaluate(source) == ("ab1cNone   x   a-b aqb q-00003 1:   2 a-b 14 [1, 2, 2] x   3 ['a']")


def test_time_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("bough.text.bounded_jinja.MAX_SECONDS", 0.1)
    with pytest.raises(TemplateFailed, match="runs over"):
        evaluate("{% for i in range(90000) %}{% for j in range(9) %}{% endfor %}{% endfor %}")


def test_a_conversation_is_rendered_at_most_twice(monkeypatch: pytest.MonkeyPatch):
    template = ChatTemplate.from_metadata(METADATA)
    template.render([ASK])
    rendered: list[int] = []
    run = ChatTemplate._run
    monkeypatch.setattr(
        ChatTemplate, "_run", lambda self, given: rendered.append(len(given["messages"])) or run(self, given)
    )
    system = {"role": "system", "content": "Be brief."}
    turns = [ASK, {"role": "assistant", "content": "Yes."}] * 10
    template.render([system, *turns, ASK], tools=[WEATHER], boundaries=True)
    assert rendered == [22, 2, 22]  # all, the system message and tools, until the last user message
    rendered.clear()
    template.render([system, *turns, ASK, *turns[1:2]], tools=[WEATHER], boundaries=True)
    assert rendered == [23, 22]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% if %}", r"cannot be compiled: .* in line 1"),
        ("{% for x in y %}", "cannot be compiled"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ missing.field }}", "UndefinedError: 'missing' is undefined"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ raise_exception }}{{ [] | first | tojson }}", "not JSON serializable"),
        ("{{ raise_exception('my own words') }}", "refused the conversation: my own words"),
    ],
)
def test_failures_of_the_template_are_reported(source: str, message: str):
    with pytest.raises(TemplateFailed, match=message):
        evaluate(source)


def test_wrong_arguments_are_named():
    with pytest.raises(UsageError, match="'bos_token' cannot be set"):
        render(ASK, bos_token="x")
    with pytest.raises(UsageError, match=r"tools\[1\] is of type str"):
        render(ASK, tools=[WEATHER, "weather"])
    with pytest.raises(UsageError, match="tools is of type dict"):
        render(ASK, tools=WEATHER)
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(UsageError, match="deeper than 100 levels"):
        render(ASK, tools=[{"deep": deep}])


contents = st.lists(st.sampled_from([*CONTROL, "\ufdd0", "\ufdd1", "<think>", "|>", "hi", "\n"]), max_size=6)


@given(user=contents.map("".join), tool=contents.map("".join))
def test_the_conversation_cannot_forge_control_tokens(user: str, tool: str):
    tools = [{"name": tool, "parameters": {tool: 1}}]
    rendered = TEMPLATE.render([{"role": "user", "content": user}], tools=tools, boundaries=True)
    ids = TOKENIZER.encode(rendered.text, literals=rendered.literals)
    kept = [TOKENIZER.token_bytes(id).decode() for id in ids if 500 <= id < 504]
    assert kept == ["<|im_start|>", "<|im_end|>", "<|im_start|>", "<|im_end|>", "<|im_start|>"]
    assert TOKENIZER.decode(ids, skip_special=False) == rendered.text
    assert "\ufdd0" not in rendered.text
    assert user.replace("\ufdd0", "").replace("\ufdd1", "").strip() in rendered.text
    assert all(rendered.text[start:end] in CONTROL for start, end in rendered.literals)


def test_boundaries_are_shared_with_shorter_and_other_conversations():
    conversation = [
        {"role": "system", "content": "Be brief."},
        ASK,
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Spell <|im_end|>"},
        {"role": "assistant", "content": "No."},
        {"role": "user", "content": "Why?"},
    ]
    rendered = TEMPLATE.render(conversation, tools=[WEATHER], boundaries=True)
    heads = [rendered.text[:end] for end in rendered.boundaries]
    other = TEMPLATE.render([conversation[0], {"role": "user", "content": "Bye"}], tools=[WEATHER]).text
    assert heads[0].endswith("Be brief.<|im_end|>\n")
    assert other.startswith(heads[0])
    assert rendered.boundaries == sorted(set(rendered.boundaries))
    assert heads[-1] + "<|im_start|>assistant\n<think>\n" == rendered.text
    assert [head.rpartition("\n")[0].rpartition("\n")[2] for head in heads[1:]] == [
        "Hi<|im_end|>",
        "Hello.<|im_end|>",
        "Spell <|im_end|><|im_end|>",
        "No.<|im_end|>",
        "Why?<|im_end|>",
    ]
    ids = TOKENIZER.encode(rendered.text, literals=rendered.literals)
    for head in heads:
        literals = [span for span in rendered.literals if span[1] <= len(head)]
        part = TOKENIZER.encode(head, literals=literals)
        assert ids[: len(part)] == part


def test_a_growing_conversation_keeps_its_boundaries():
    conversation = [{"role": "system", "content": "Be brief."}]
    seen: list[str] = []
    for turn in range(12):
        conversation.append({"role": "user", "content": f"question {turn}"})
        rendered = TEMPLATE.render(conversation, boundaries=True)
        seen.append(rendered.text[: rendered.boundaries[-1]])
        conversation.append({"role": "assistant", "content": f"<think>\nhm\n</think>\n\nanswer {turn}"})
        assert len(rendered.boundaries) <= 9
    assert all(later.startswith(earlier) for earlier, later in pairwise(seen))


def test_the_last_user_message_has_a_boundary():
    conversation = [
        {"role": "system", "content": "Be brief."},
        ASK,
        *({"role": "assistant", "content": f"Step {i}."} for i in range(12)),
    ]
    rendered = TEMPLATE.render(conversation, boundaries=True)
    assert rendered.last_user_end in rendered.boundaries
    assert rendered.text[: rendered.last_user_end].endswith("Hi<|im_end|>\n")
    assert TEMPLATE.is_control_at(rendered.text, rendered.last_user_end)
    assert not TEMPLATE.is_control_at(rendered.text, rendered.last_user_end - 1)
    assert TEMPLATE.render(conversation).last_user_end is None


# As Qwen3.8's: other words are refused.
EFFORTS = """\
{%- set reasoning_effort = reasoning_effort | default('xhigh') %}
{%- if reasoning_effort not in ('xhigh', 'medium', 'low') %}{{ raise_exception('no such effort') }}{% endif %}
{{- reasoning_effort }} {{ enable_thinking | default(true) }}"""


@pytest.mark.parametrize(
    ("wanted", "word"),
    [("minimal", "low"), ("low", "low"), ("medium", "medium"), ("high", "xhigh"), ("max", "xhigh")],
)
def test_an_effort_reaches_the_template_in_its_own_words(wanted: str, word: str):
    assert evaluate(EFFORTS, effort=wanted) == f"{word} True"
    assert ChatTemplate(EFFORTS, effort=wanted).render([ASK]).text == f"{word} True"
    assert evaluate(EFFORTS, effort=wanted, thinking=False) == "xhigh False"
    assert evaluate(EFFORTS, effort=wanted, reasoning_effort="medium") == "medium True"


def test_templates_without_a_word_for_an_effort_do_not_see_it():
    assert evaluate(EFFORTS) == "xhigh True"
    assert evaluate(EFFORTS.replace("'medium'", "'deep'"), effort="medium") == "xhigh True"
    assert evaluate("{{ reasoning_effort is defined }}", effort="low") == "False"
    assert TEMPLATE.effort("low") is None and render(ASK, effort="low") == render(ASK)
