"""Chat templates for tests: of real families in short, with every extra, and hostile ones."""
# ruff: noqa: E501

from __future__ import annotations

CHATML = (
    "{%- for message in messages %}\n"
    "    {%- if loop.first and message.role != 'system' %}\n"
    "        {{- '<|im_start|>system\nBe kind.<|im_end|>\n' }}\n"
    "    {%- endif %}\n"
    "    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}\n"
)
QWEN = (
    "{%- if tools %}{{- '<|im_start|>system\n' }}{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}"
    "{{- '<|im_end|>\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'assistant' and message.tool_calls %}{{- '<|im_start|>assistant' }}"
    "{%- if message.content %}{{- '\n' + message.content }}{%- endif %}"
    "{%- for call in message.tool_calls %}{%- if call.function is defined %}{%- set call = call.function %}{%- endif %}"
    "{{- '\n<tool_call>\n{\"name\": \"' + call.name + '\", \"arguments\": ' }}{{- call.arguments | tojson }}{{- '}\n</tool_call>' }}"
    "{%- endfor %}{{- '<|im_end|>\n' }}"
    "{%- elif message.role == 'tool' %}"
    "{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}"
    "{%- else %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate!') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] | trim + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% endif %}{% endfor %}"
)
EXTRAS = (
    "{% set ns = namespace(found=false, text='') %}\n"
    "  {% for m in messages %}\n"
    "    {% if m.role == 'system' %}{% continue %}{% endif %}\n"
    "    {% set ns.text = ns.text ~ loop.index ~ '|' ~ m.content | upper ~ '\n' %}\n"
    "    {% if m.content.startswith('stop') %}{% break %}{% endif %}\n"
    "  {% endfor %}\n"
    "{{ ns.text }}{{ {'a': '<é>', 'b': [1, none, true]} | tojson(indent=2) }}{{ strftime_now('%Y') }}\n"
    "{{ dict(a=1) }} {{ missing }} {{ unk_token }} {% macro twice(x) %}{{ x }}{{ x }}{% endmacro %}{{ twice('é') }}\n"
    "{{ '%s-%s' | format(1, 2) }} {{ [1, 2] + [3] }} {{ 'ab' * 3 }} {{ 2 ** 10 }} {{ messages | length }}"
)
PARTS = (
    "{% for m in messages %}{{ m.role }}:{% for part in m.content %}[{{ part.type }}={{ part.text }}]{% endfor %}\n"
    "{% endfor %}"
)
HOSTILE = {
    "class": "{{ ''.__class__.__mro__ }}",
    "subclasses": "{{ ''.__class__.__base__.__subclasses__() }}",
    "attr filter": "{{ ''|attr('__class__') }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "format": "{{ '{0.__class__}'.format('') }}",
    "self": "{{ self._TemplateReference__context }}",
    "namespace": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "change": "{{ messages.append(1) }}",
    "include": "{% include '/etc/passwd' %}",
    "range": "{% for i in range(10**9) %}{{ i }}{% endfor %}",
    "nested": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "branching": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "product": "{{ 'a' * 10**10 }}",
    "power": "{{ 9**99999999 }}",
    "powers": "{{ 9**9**9**9**9**9**9**9**9**9 }}",
    "center": "{{ 'a' | center(9999999999) }}",
    "percent": "{{ '%9999999999d' % 1 }}",
    "format filter": "{{ '%9999999999d' | format(1) }}",
    "padding": "{{ 'a'.center(10**10) }}",
    "doubling": "{% set ns = namespace(s='aaaa') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "adding": "{% set ns = namespace(s='aaaa') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "long": "{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}",
    "division": "{{ 1 / 0 }}",
    "attribute": "{{ messages[0].content.nothing.more }}",
    "type": "{{ 'a' + 1 }}",
    "index": "{{ messages[7].role }}",
}


BOTH = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}"
)
ALIAS = "{% for m in messages %}{% set c = m['content'] %}{% for p in c %}{{ p.text }}{% endfor %}{% endfor %}"
