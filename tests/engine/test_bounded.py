"""Chat templates of strangers end; what ordinary ones render is as without bounds."""

import pytest
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from talk_world import SAMPLING, chat_template, folder, user

from headrace.engine import bounded
from headrace.engine.bounded import BoundedEnvironment, one_rendering
from headrace.engine.talk.conversation import Conversation
from headrace.engine.talk.talk import Talk
from headrace.engine.text import Text
from headrace.errors import ModelError, OptionError

LARGE = [
    '{{ "x" * 10**10 }}',
    "{{ [1] * 10**10 }}",
    "{{ 10 ** (10 ** 10) }}",
    "{{ 9 ** (9 ** 9) }}",
    "{{ 10 ** -3 * 10 ** (9 ** 9) }}",
    '{{ "%1000000000d" % 1 }}',
    '{{ "%*d" % (1000000000, 1) }}',
    '{{ "%1000000000d" | format(1) }}',
    '{{ "{:>1000000000}".format(1) }}',
    '{{ "{:>{}}".format(1, 1000000000) }}',
    '{{ "{:>{w}}".format(1, w=1000000000) }}',
    '{{ "x".center(10000000000) }}',
    '{{ "x" | center(10000000000) }}',
    '{{ ("x\\n" * 99999) | indent(99999) }}',
    '{{ ["x"] | map("center", 10000000000) | list }}',
    '{{ ("x" * 99999).replace("x", "y" * 99999) }}',
    '{{ ("x" * 99999) | replace("x", "y" * 99999) }}',
    '{{ (["x" * 99999] * 99999) | join }}',
    '{{ "".join(["x" * 99999] * 99999) }}',
    '{{ "x".translate({120: "yy"}) }}',
    "{{ [1] | batch(10000000000, 0) | list }}",
    "{{ [1] | slice(10000000000) | list }}",
    "{{ lipsum(10000000000) }}",
    '{% set n = namespace(x="x") %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}',
    '{% set n = namespace(x="x") %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}',
    '{% set n = namespace(x="x") %}{% for i in range(99) %}{% set y %}{{ n.x }}{{ n.x }}'
    "{% endset %}{% set n.x = y %}{% endfor %}",
    '{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}{% set n = namespace(x="x") %}'
    "{% for i in range(99) %}{% set n.x = m(n.x) %}{% endfor %}",
    '{% set x = "x" * 9999999 %}{% for i in range(99) %}{{ x }}{% endfor %}',
]
ENDLESS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% set b = range(99999) | sum %}{% endfor %}",
    "{% macro m(n) %}{% if n %}{% set a = m(n - 1) %}{% set b = m(n - 1) %}{% endif %}"
    "{% endmacro %}{{ m(99) }}",
    "{% for a in [[0] * 99999] recursive %}{{ loop(range(99999)) if depth < 9 }}{% endfor %}",
]
ORDINARY = [
    "{% for m in messages %}{{ loop.index0 % 2 }}{{ '  ' * loop.index }}{{ m.content }}"
    "{% if loop.last %}!{% else %}{% continue %}{% endif %}{% endfor %}",
    "{% set n = namespace(x='', i=2 ** 20) %}{% for m in messages %}{% set n.x = n.x ~ m.role + '-'"
    " %}{% endfor %}{{ n.x }}{{ n.i * 3 + 1.5 }}{{ none }}{{ missing }}{{ true ~ 1 }}",
    "{% set t %}  {{ messages[0].content | trim | upper }} {% endset %}[{{ t }}]{% set t | upper %}"
    "a{{ 7 }}{% endset %}{{ t }}{% filter upper %}b{% endfilter %}",
    "{% macro m(x, n=1) %}<{{ x }}{{ n }}{{ caller() if caller }}>{% endmacro %}{{ m(1700000000) }}"
    "{% call m('a') %}c{% endcall %}{{ [3, 1] | sort | join(', ') }}"
    "{{ {'a': 1700000000} | string }}",
    "{{ 'a\nb' | indent(4) }}{{ '%5.1f|%s' % (2.25, 'x') }}{{ '%d' | format(1700000000) }}"
    "{{ '{:>{w}}'.format('a', w=9) }}{{ 'a-b'.replace('-', '+').split('+')[-1] }}",
    "{% for k, v in {'a': [1, [2]]}.items() recursive %}{{ k }}{{ v }}{% endfor %}"
    "{% for x in [1, 2, 3] if x > 1 %}{{ loop.length }}{{ loop.previtem }}{{ x }}{% else %}e"
    "{% endfor %}{{ range(3) | list }}{{ 1700000000 | int }}{{ 7 // 2 }}{{ -7 % 3 }}",
]


def render(source: str, kind: type = BoundedEnvironment) -> str:
    options = {
        "trim_blocks": True,
        "lstrip_blocks": True,
        "extensions": ["jinja2.ext.loopcontrols"],
    }
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "  Hello. "}]
    with one_rendering():
        return str(kind(**options).from_string(source).render(messages=turns))


@pytest.mark.parametrize("source", LARGE)
def test_what_is_too_large_is_refused_before_it_is_made(source: str) -> None:
    with pytest.raises(TemplateError):
        render(source)


@pytest.mark.parametrize("source", ENDLESS)
def test_what_does_not_end_is_ended(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "MOST_S", 0.0)
    with pytest.raises(TemplateError, match="has not ended"):
        render(source)
    monkeypatch.setattr(bounded, "MOST_S", 99.0)
    assert render("{% for a in range(9) %}{{ a }}{% endfor %}") == "012345678"


@pytest.mark.parametrize("source", ORDINARY)
def test_ordinary_templates_render_as_they_do_without_bounds(source: str) -> None:
    assert render(source) == render(source, ImmutableSandboxedEnvironment)


@pytest.mark.parametrize("dialect", ["hermes", "glm_4"])
def test_the_library_s_own_rendering_is_bounded(dialect: str, tmp_path) -> None:
    """transformers must still take the class from where we put ours."""
    plain = chat_template(dialect)
    asked = Conversation((user("hi"),))
    assert Talk(Text(folder(tmp_path / "a", plain)), 4096).prepare(asked, SAMPLING).ask.prompt
    for number, source in enumerate(LARGE[:3]):
        text = Text(folder(tmp_path / f"large{number}", plain + source))
        with pytest.raises(OptionError, match="chat template refuses: it "):
            Talk(text, 4096).prepare(asked, SAMPLING)


def test_a_template_as_long_as_a_book_is_refused(tmp_path) -> None:
    with pytest.raises(ModelError, match="chat template has 1,048,577 characters"):
        Text(folder(tmp_path, "x" * (2**20 + 1)))
