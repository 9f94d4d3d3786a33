from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmcomp.calibration.chat import Template
from llmcomp.errors import CalibrationError, TokenizerError

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <brief>."},
    {"role": "user", "content": "naïve?"},
    {"role": "assistant", "content": "yes", "tool_calls": [{"name": "f", "arguments": {"b": 1, "a": "ü"}}]},
    {"role": "user", "content": "stop"},
    {"role": "user", "content": "never"},
]
TEMPLATES = [
    "{% for m in messages %}[{{ m.role }}] {{ m['content'] }}{{ eos_token }}\n{% endfor %}",
    # Lines of statements leave no line behind; loops can stop; filters do not escape.
    """{{ bos_token }}
    {%- for m in messages %}
        {%- if m.content == 'stop' %}{% break %}{% endif %}
        {% if m.tool_calls is defined %}
            {{- m.tool_calls[0] | tojson(indent=2) }}{{ m.tool_calls | tojson }}
        {% endif %}
{{ m.content | trim }}|
    {% endfor %}
{% if tools %}tools{% endif %}{% if add_generation_prompt %}<|assistant|>{% endif %}""",
    # What is set within the assistant's part is not seen outside it.
    "{% set x = 'a' %}{% for m in messages %}{% generation %}{% set x = 'b' %}{{ m.content }}{{ x }}\n{% endgeneration %}{{ x }}{% endfor %}",
]
CONFIG = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "pad_token": None}


def template(folder: Path, source: str | None, **config: Any) -> Template:
    (folder / "tokenizer_config.json").write_text(json.dumps({**CONFIG, **config}))
    if source is not None:
        (folder / "chat_template.jinja").write_text(source, encoding="utf8")
    return Template(folder)


@pytest.mark.parametrize("source", TEMPLATES)
def test_as_transformers_renders_it(tmp_path: Path, source: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    (wanted,), _ = render_jinja_template([MESSAGES], chat_template=source, bos_token="<s>", eos_token="</s>")
    assert template(tmp_path, source).render(MESSAGES, "here") == wanted


def test_the_date_is_always_the_same(tmp_path: Path) -> None:
    assert template(tmp_path, "{{ strftime_now('%d %b %Y') }}").render(MESSAGES, "here") == "01 Jan 2025"


def test_where_templates_are(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="its tokenizer has no chat template"):
        template(tmp_path, None)
    assert template(tmp_path, None, chat_template="config").render([], "") == "config"
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "default"}]
    assert template(tmp_path, None, chat_template=several).render([], "") == "default"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert template(tmp_path, None, chat_template="config").render([], "") == "json"
    assert template(tmp_path, "jinja", chat_template="config").render([], "") == "jinja"
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"unk_token": "<unk>", "bos_token": "<old>"}))
    assert template(tmp_path, "{{ unk_token }}{{ bos_token }}").render([], "") == "<unk><s>"


def test_what_a_template_refuses(tmp_path: Path) -> None:
    wrong = template(tmp_path, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(CalibrationError, match=r"c.jsonl, line 7: the model's chat template refuses it \(roles must alternate\)"):
        wrong.render(MESSAGES, "c.jsonl, line 7")
    with pytest.raises(CalibrationError, match="line 7: the model's chat template refuses it"):
        template(tmp_path, "{{ messages[0].content + 1 }}").render(MESSAGES, "line 7")
    with pytest.raises(CalibrationError, match="its chat template is broken"):
        template(tmp_path, "{% for %}")
    with pytest.raises(CalibrationError, match=r"refuses it .*unsafe"):
        template(tmp_path, "{{ messages.__class__.__mro__[1].__subclasses__() }}").render(MESSAGES, "line 7")
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(TokenizerError, match="not a JSON object"):
        Template(tmp_path)
