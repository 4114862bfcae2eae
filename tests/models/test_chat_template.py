"""Chat templates render what the reference renders, cannot reach outside, and fail in one line."""

import datetime
import json
from pathlib import Path

import pytest

from models import ChatTemplate, ChatTemplateError, Tokenizer
from models.chat_template import template_from_directory, template_from_gguf

MESSAGES = [{"role": "user", "content": "<Hi> & 'bye' \u00e9"}]


def test_every_rendering_and_its_ids_equal_the_reference(
    golden: Path, smollm2_metadata: dict, smollm2_tokenizer: Tokenizer
) -> None:
    template = template_from_gguf(smollm2_metadata, smollm2_tokenizer)
    assert template is not None
    cases = json.loads((golden / "tokenizer" / "chat.json").read_text())
    assert len(cases) == 16
    for case in cases:
        text = template.render(case["messages"], add_generation_prompt=case["add_generation_prompt"])
        assert text == case["text"], case["name"]
        assert smollm2_tokenizer.encode(text, add_special=False) == case["ids"], case["name"]


def test_the_template_in_the_file_is_the_reference_template(golden: Path, smollm2_metadata: dict) -> None:
    template = template_from_gguf(smollm2_metadata, None)
    assert template is not None
    assert template.source == (golden / "tokenizer" / "chat_template.jinja").read_text()


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}\n  {% if true %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}", "user\n"),
        ("{% for m in messages %}{% break %}{% endfor %}x", "x"),
        ("{{ messages[0].content | tojson }}", "\"<Hi> & 'bye' \u00e9\""),
        ("{{ {'b': 1, 'a': [2]} | tojson(indent=1) }}", '{\n "b": 1,\n "a": [\n  2\n ]\n}'),
        ("{{ bos_token }}|{{ eos_token }}", "<s>|</s>"),
        ("{{ tools is none }} {{ add_generation_prompt }}", "True True"),
        ("{{ messages[0]['content'] }}", MESSAGES[0]["content"]),
    ],
)
def test_templates_find_what_their_authors_expect(source: str, text: str) -> None:
    assert ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(MESSAGES) == text


def test_a_template_knows_the_date() -> None:
    before = datetime.date.today()
    day = datetime.date.fromisoformat(ChatTemplate("{{ strftime_now('%Y-%m-%d') }}").render(MESSAGES))
    assert before <= day <= datetime.date.today()


def test_tools_reach_the_template() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert ChatTemplate("{{ tools[0].function.name }}").render(MESSAGES, tools=tools) == "f"


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("{{ raise_exception('roles must\n alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "refuses the messages"),
        ("{{ messages[5].content.x }}", "refuses the messages"),
        ("{{ 1 // 0 }}", "refuses the messages"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "refuses the messages"),
    ],
)
def test_a_template_that_refuses_or_fails_is_one_line(source: str, named: str) -> None:
    with pytest.raises(ChatTemplateError, match=named) as refusal:
        ChatTemplate(source).render(MESSAGES)
    assert "\n" not in str(refusal.value)


def test_a_template_that_does_not_parse_is_one_line() -> None:
    with pytest.raises(ChatTemplateError, match="chat template is invalid") as refusal:
        ChatTemplate("{% for %}")
    assert "\n" not in str(refusal.value)


def test_a_directory_keeps_its_template_in_either_place(tmp_path: Path) -> None:
    assert template_from_directory(tmp_path, None) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "one"}))
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "two"}]
    assert template_from_directory(tmp_path, None).render([]) == "one"
    config.write_text(json.dumps({"chat_template": named}))
    assert template_from_directory(tmp_path, None).render([]) == "two"
    config.write_text(json.dumps({"chat_template": ["neither", {"name": "rag"}]}))
    assert template_from_directory(tmp_path, None) is None
    (tmp_path / "chat_template.jinja").write_text("three")
    assert template_from_directory(tmp_path, None).render([]) == "three"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ChatTemplateError, match=r"cannot read .*chat_template\.jinja"):
        template_from_directory(tmp_path, None)


def test_the_template_gets_the_spelling_of_the_special_tokens(tiny_tokenizer: Tokenizer) -> None:
    template = template_from_gguf({"tokenizer.chat_template": "{{ bos_token }}{{ eos_token }}"}, tiny_tokenizer)
    assert template is not None
    assert template.render([]) == "<|start|><|end|>"
